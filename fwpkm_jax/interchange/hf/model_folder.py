"""A model's folder: its configuration, and its weights read tensor by tensor onto devices."""

import dataclasses
from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.config import from_json
from fwpkm_jax.interchange.hf.described import changes
from fwpkm_jax.interchange.hf.families import FAMILIES, Family, text_config
from fwpkm_jax.interchange.hf.layout import Part, Parts, check_shapes, parts, plain_name, skipped
from fwpkm_jax.interchange.hf.settings import model_config
from fwpkm_jax.interchange.tensor_files import TensorFiles
from fwpkm_jax.interchange.weights import (
    Weights,
    abstract_weights,
    check_finite,
    check_shape,
    refuse_other_names,
)
from fwpkm_jax.io.status_line import watched
from fwpkm_jax.io.untrusted import OutsideFileError, read_json, reading, shown
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.sharding import parameter_shardings
from fwpkm_jax.storage.host_memory import aligned, freed_memory_returned, is_aligned
from fwpkm_jax.training.state import named_leaves

NOTE = "fwpkm_jax"
"""Key in `config.json` for what the transformers library has nothing for."""
MEMORIES = "fwpkm_memories.safetensors"
"""File of the arrays that belong to it, which the library does not look for."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FETCH = "fetch the folder again"
_OTHER_MODEL = "import a model of a family that `fwpkm import hf --help` names"
ParameterDtype = Literal["float32", "bfloat16"]


class Tensors(Protocol):
    """Tensors by name, as `TensorFiles`."""

    def __getitem__(self, name: str, /) -> Any: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def items(self) -> ItemsView[str, Any]: ...
    def read(self, name: str) -> np.ndarray: ...


class ModelFolder(NamedTuple):
    """A folder whose configuration and names have been checked; no tensor is read yet.

    Attributes:
      config: of the model.
      text: the part of `config.json` about the decoder.
      files: the tensors.
      stored: name in the files by plain name.
      parts: the tensors of each array.
      left_out: of tensors that the model has no place for, how many belong to what.
      memories: what `fwpkm export hf` has written beside the model; None without memories.
    """

    config: ModelConfig
    text: dict[str, Any]
    files: Tensors
    stored: dict[str, str]
    parts: Parts
    left_out: dict[str, int]
    memories: TensorFiles | None

    @property
    def family(self) -> Family:
        return FAMILIES[self.text["model_type"]]


def open_folder(
    folder: str | Path, *, dtype: ParameterDtype | None = None, files: Tensors | None = None
) -> ModelFolder:
    """What a folder holds, checked by the headers of its files.

    Args:
      folder: with `config.json` and safetensors files, as the transformers library saves them.
      dtype: of the matrices; None: bfloat16 where all of them are stored so, else float32.
      files: the tensors, where they are not in the folder.

    Raises:
      FileNotFoundError: a file is missing.
      OutsideFileError: a file is damaged, the configuration asks for something unknown, or tensors
        are missing, left over, doubled or of another shape; each is named.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {folder} holds no model.")
    values = read_json(path, otherwise=_FETCH, kind=dict)
    with reading(path, problem="cannot be imported", otherwise=_OTHER_MODEL):
        text, config = text_config(values), model_config(values)
        note = values.get(NOTE)
        if note is not None:
            config = _noted(note, config)
    files = TensorFiles(folder) if files is None else files
    _check_counts(config, files, path)
    stored = {plain_name(name): name for name in files}
    if len(stored) < len(files):
        double = next(name for name in files if stored[plain_name(name)] != name)
        problem = f"holds it and {stored[plain_name(double)]}, which are the same weights"
        raise OutsideFileError(folder, problem, f"tensor {double!r}", _FETCH)
    away = skipped(stored)
    left_out = {what: list(away.values()).count(what) for what in dict.fromkeys(away.values())}
    left_out.pop("", None)
    for name in away:
        del stored[name]
    found = parts(config, FAMILIES[text["model_type"]], found=stored)
    expected = {name: None for part in found.values() for name in part.names}
    if config.tie_embeddings and HEAD in stored:
        _check_tied(files, stored, folder)
        del stored[HEAD]
    refuse_other_names(stored, expected, folder)
    for part in found.values():
        with reading(folder, problem="does not fit its config.json", otherwise=_FETCH):
            check_shapes(part, [files[stored[name]].shape for name in part.names])
    if dtype is None:
        matrices = {
            files[stored[name]].dtype
            for part in found.values()
            for name, shape in zip(part.names, part.shapes, strict=True)
            if len(shape) > 1
        }
        dtype = "bfloat16" if matrices == {"BF16"} else "float32"
    config = dataclasses.replace(config, parameter_dtype=dtype, activation_dtype=dtype)
    memories = None if note is None else TensorFiles(folder, file=MEMORIES)
    if memories is not None:
        with reading(path, problem="cannot be imported", otherwise=_FETCH):
            whole = abstract_weights(config, groups=_num_memories(memories)).named()
        ours = {name: leaf for name, leaf in whole.items() if name not in found}
        refuse_other_names(memories, ours, folder / MEMORIES)
        for name, leaf in ours.items():
            check_shape(name, memories[name].shape, leaf.shape, folder / MEMORIES)
    return ModelFolder(config, text, files, stored, found, left_out, memories)


def read_weights(folder: ModelFolder, *, partition: Partition | None = None) -> Weights:
    """The model's weights on their devices.

    One array after the other is read, put together and laid out, so that the host holds one array
    more than the devices.

    Args:
      folder: from `open_folder`.
      partition: the devices; None: the first one.

    Raises:
      OutsideFileError: a tensor holds NaN or infinity, numbers too large for its dtype, or no
        floating-point numbers.
    """
    groups = 1 if folder.memories is None else _num_memories(folder.memories)
    like = abstract_weights(folder.config, groups=groups)
    layout: dict[str, Any] = {}
    if partition is not None:
        layout = named_leaves(parameter_shardings(partition, like.params))
    arrays = {}
    with freed_memory_returned():
        for name, leaf in watched(like.named().items(), "arrays read"):
            place = layout.get(name.removeprefix("params/"))
            if name in folder.parts:
                array = _read(folder, folder.parts[name], leaf.dtype)
            else:
                assert folder.memories is not None, "other arrays belong to memories"
                array = _checked(folder.memories, name, leaf.dtype)
            arrays[name] = _put(array, leaf, place)
    return like.replaced(arrays)


def _read(folder: ModelFolder, part: Part, dtype: np.dtype) -> np.ndarray:
    return part.pack(
        lambda number: _checked(folder.files, folder.stored[part.names[number]], dtype)
    )


def _checked(files: Tensors, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor, every number of which is finite in a dtype."""
    array, file = files.read(name), files[name].file
    check_finite(name, array, file)
    most = float(jnp.finfo(dtype).max)
    if float(jnp.finfo(array.dtype).max) > most and np.any(np.abs(array) > most):
        problem = f"holds numbers above {most:.3g}, the most of {np.dtype(dtype).name}"
        fits = np.all(np.abs(array) <= float(jnp.finfo(jnp.float32).max))
        way_out = "choose --dtype float32" if fits else "import weights that float32 can hold"
        raise OutsideFileError(file, problem, f"tensor {name!r}", way_out)
    return array


def _noted(note: Any, imported: ModelConfig) -> ModelConfig:
    """The model with its memories that an export has written beside the library's configuration."""
    if not isinstance(note, dict) or "model" not in note:
        raise ValueError(f"{NOTE}={shown(repr(note), 60)} must be an object with a model")
    config = from_json(note["model"], ModelConfig, path=f"{NOTE}.model")
    changed = changes(imported, config)
    if changed:
        raise ValueError(f"its note of memories describes another model, {changed[0]}")
    return config


def _check_counts(config: ModelConfig, files: Tensors, path: Path) -> None:
    """Refuses layers and experts of which the files cannot hold one tensor each."""
    if len(config.mixers) > len(files):
        what = f"num_hidden_layers={len(config.mixers)}"
    elif (experts := config.experts.num_experts) * len(config.expert_layers) > len(files) and not (
        any(name.endswith("experts.gate_up_proj") for name in files)
    ):
        what = f"num_experts={experts} in {len(config.expert_layers)} layers"
    else:
        return
    problem = f"asks for {what}, and the files hold {len(files)} tensors"
    raise OutsideFileError(path, problem, otherwise=_FETCH)


def _num_memories(memories: TensorFiles) -> int:
    """Memories of each layer; shapes that contradict it are found when they are compared."""
    shapes = [x.shape for name, x in memories.items() if name.startswith("memory/") and x.shape]
    return min(max((shape[0] for shape in shapes), default=1), 2**31 - 1)


def _put(array: np.ndarray, like: jax.ShapeDtypeStruct, place: Any) -> jax.Array:
    """An array on its devices. CPU devices take over the host's, others copy it."""
    assert array.shape == like.shape, "the shapes of the tensors have been checked"
    if place is None:
        return jax.device_put(_as_stored(array, like.dtype))
    return jax.make_array_from_callback(
        like.shape, place, lambda index: _as_stored(array[index], like.dtype)
    )


def _as_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers as they lie on a device: one after the other, in that dtype."""
    if array.dtype == dtype and array.flags.c_contiguous and is_aligned(array):
        return array
    made = aligned(array.shape, np.dtype(dtype))
    np.copyto(made, array, casting="unsafe")
    return made


def _check_tied(files: Tensors, stored: dict[str, str], folder: Path) -> None:
    """A head that is stored beside the embedding it is tied to must be equal to it."""
    embedding = stored.get(EMBEDDING)
    if embedding is None:
        return  # Named as missing by the caller.
    if files[stored[HEAD]].shape != files[embedding].shape or not np.array_equal(
        files.read(stored[HEAD]), files.read(embedding)
    ):
        raise OutsideFileError(
            folder / "config.json",
            f"has tie_word_embeddings=True, but {HEAD} differs from {EMBEDDING}",
            otherwise="it needs tie_word_embeddings=False",
        )
