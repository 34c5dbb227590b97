"""A model's folder: its configuration, and its weights read tensor by tensor onto devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fwpkm_jax.config import from_json
from fwpkm_jax.host_memory import aligned, freed_memory_returned, is_aligned
from fwpkm_jax.interchange.hf.families import FAMILIES, Family, model_config, text_config
from fwpkm_jax.interchange.hf.layout import Part, Parts, check_shapes, parts, plain_name, skipped
from fwpkm_jax.interchange.hf.tensor_files import TensorFiles
from fwpkm_jax.interchange.weights import Weights, abstract_weights, checked, refuse_other_names
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.sharding import parameter_shardings
from fwpkm_jax.outside_files import read_json
from fwpkm_jax.training.state import named_leaves

NOTE = "fwpkm_jax"
"""Key in `config.json` for what the transformers library has nothing for."""
MEMORIES = "fwpkm_memories.safetensors"
"""File of the arrays that belong to it, which the library does not look for."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ParameterDtype = Literal["float32", "bfloat16"]


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
    files: TensorFiles
    stored: dict[str, str]
    parts: Parts
    left_out: dict[str, int]
    memories: TensorFiles | None

    @property
    def family(self) -> Family:
        return FAMILIES[self.text["model_type"]]


def open_folder(folder: str | Path, *, dtype: ParameterDtype | None = None) -> ModelFolder:
    """What a folder holds, checked by the headers of its files.

    Args:
      folder: with `config.json` and safetensors files, as the transformers library saves them.
      dtype: of the matrices; None: bfloat16 where all of them are stored so, else float32.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the configuration asks for something unknown, or tensors are missing, left over or
        of another shape; each is named.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; {folder} holds no model.")
    values = read_json(path, otherwise="fetch it again")
    try:
        text, config = text_config(values), model_config(values)
        note = values.get(NOTE)
        if note is not None:
            config = from_json(note["model"], ModelConfig, path=f"{NOTE}.model")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    files = TensorFiles(folder)
    stored = {plain_name(name): name for name in files}
    away = skipped(stored)
    left_out = {what: list(away.values()).count(what) for what in dict.fromkeys(away.values())}
    left_out.pop("", None)
    for name in away:
        del stored[name]
    found = parts(config, FAMILIES[text["model_type"]], found=stored)
    expected = {name: None for part in found.values() for name in part.names}
    if config.tie_embeddings and HEAD in stored:
        _check_tied(files, stored)
        del stored[HEAD]
    refuse_other_names(stored, expected, str(folder))
    for part in found.values():
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
        ours = {name: None for name in abstract_weights(config).named() if name not in found}
        refuse_other_names(memories, ours, str(folder / MEMORIES))
    return ModelFolder(config, text, files, stored, found, left_out, memories)


def read_weights(folder: ModelFolder, *, partition: Partition | None = None) -> Weights:
    """The model's weights on their devices.

    One array after the other is read, put together and laid out, so that the host holds one array
    more than the devices.

    Args:
      folder: from `open_folder`.
      partition: the devices; None: the first one.
    """
    groups = 1
    if folder.memories is not None:
        groups = max(x.shape[0] for n, x in folder.memories.items() if n.startswith("memory/"))
    like = abstract_weights(folder.config, groups=groups)
    layout: dict[str, Any] = {}
    if partition is not None:
        layout = named_leaves(parameter_shardings(partition, like.params))
    arrays = {}
    with freed_memory_returned():
        for name, leaf in like.named().items():
            place = layout.get(name.removeprefix("params/"))
            if name in folder.parts:
                array = _read(folder, folder.parts[name])
            else:
                assert folder.memories is not None, "other arrays belong to memories"
                array = checked(name, folder.memories.read(name), leaf.shape)
            arrays[name] = _put(array, leaf, place)
    return like.replaced(arrays)


def _read(folder: ModelFolder, part: Part) -> np.ndarray:
    return part.pack(lambda number: folder.files.read(folder.stored[part.names[number]]))


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


def _check_tied(files: TensorFiles, stored: dict[str, str]) -> None:
    """A head that is stored beside the embedding it is tied to must be equal to it."""
    embedding = stored.get(EMBEDDING)
    if embedding is None:
        return  # Named as missing by the caller.
    if not np.array_equal(files.read(stored[HEAD]), files.read(embedding)):
        raise ValueError(
            f"tie_word_embeddings=True, but {HEAD} differs from {EMBEDDING}; config.json needs "
            "tie_word_embeddings=False."
        )
