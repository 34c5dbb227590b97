"""Writes a run as a folder that the transformers library loads."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.config_json import to_json
from fwpkm_jax.data.tokenizers import BYTES, MISTRAL_V1, load_tokenizer, mistral_v1_model
from fwpkm_jax.interchange.hf.card import CARD, model_card
from fwpkm_jax.interchange.hf.described import changes, config_text
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.hub import MOST_SMALL, check_push, push_folder
from fwpkm_jax.interchange.hf.imported import HUB, KEPT, SMALL_FILES, TENSORS
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.interchange.hf.model_folder import HEAD, MEMORIES, NOTE
from fwpkm_jax.interchange.hf.pytorch import (
    HYBRID,
    auto_map,
    hybrid_parts,
    hybrid_text,
    model_programs,
    unread_memory,
)
from fwpkm_jax.interchange.hf.settings import model_config
from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.io.atomic import check_new, new_folder, replacing, write_json
from fwpkm_jax.io.safetensors import DTYPES, write_tensors
from fwpkm_jax.io.untrusted import OutsideFileError, read_bytes, read_json, refuse_link
from fwpkm_jax.layers.lora import merged
from fwpkm_jax.memories.saved import fingerprint
from fwpkm_jax.run import WhichWeights, load_run
from fwpkm_jax.storage.addresses import read_small, scheme_of
from fwpkm_jax.training.runs.mirror import run_folder

_MOST_BYTES = 5 * 10**9  # Of one file, as the library cuts them.


def export_model(
    run_dir: str | Path,
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    weights: WhichWeights = "trained",
    most_bytes: int = _MOST_BYTES,
    name: str | None = None,
    license_name: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes a checkpoint of a run as a folder that the transformers library loads.

    Of a run that began as an imported model, names, shapes and dtypes are those of the folder that
    was imported. Another run gets the configuration of a family that computes the same, or of a
    hybrid. Memories go into a file of their own, and `config.json` gets a note of them; such a
    folder is imported with its memories, but for a hybrid, which only PyTorch reads. Programs for
    PyTorch, which the library runs with `trust_remote_code=True`, read and write FwPKM memories.
    Low-rank updates are added to the matrices that they belong to, which rounds them to the
    folder's dtype.

    Args:
      run_dir: the run, or one that has it as its `base`.
      folder: a new folder; an interrupted export leaves none.
      step: as in `load_run`.
      weights: as in `load_run`.
      most_bytes: of one file.
      name: `owner/name` on the hub, for the folder's card; None: the folder's own name.
      license_name: of the model, such as `apache-2.0`, for the card; None: it has none.

    Raises:
      FileExistsError: the folder exists.
      ValueError: the run's model is another than was imported, or no family computes the same.
    """
    folder = Path(folder)
    check_new(folder)
    with _kept_files(Path(run_dir)) as kept:
        experiment = read_experiment(Path(run_dir))
        model = experiment.model
        original: dict[str, Any] = {}
        if kept is None:
            text = _described(experiment)
            files = _tokenizer_files(experiment, say)
        else:
            text, original = (
                read_json(kept / name, kind=dict) for name in ("config.json", TENSORS)
            )
            there = [name for name in SMALL_FILES if os.path.lexists(kept / name)]
            files = {name: read_bytes(kept / name, most=MOST_SMALL) for name in there}
            if changed := changes(model_config(text), model):
                raise ValueError(
                    f"{run_dir} has another model than was imported ({changed[0]}), which its "
                    "config.json would not say."
                )
        run = load_run(run_dir, step, weights=weights)
        named = Weights(run.params, run.memory if model.memory_layers else {}).named()
        if model.lora is not None:
            named = merged(named, model.lora)
        model_type = text["model_type"]
        if model_type == HYBRID:
            found = hybrid_parts(named)
        else:
            found = parts(model, FAMILIES[model_type], found=original)

        def tensors() -> Iterator[tuple[str, np.ndarray]]:
            for name, part in found.items():
                shapes = (
                    [tuple(original[x]["shape"]) for x in part.names] if original else part.shapes
                )
                for x, array in zip(
                    part.names, part.unpack(np.asarray(named[name]), shapes), strict=True
                ):
                    dtype = DTYPES[original[x]["dtype"]] if original else array.dtype
                    yield x, np.ascontiguousarray(array, dtype)
            if HEAD in original and model.tie_embeddings:
                embedding = np.asarray(named["params/embedding"])
                yield HEAD, np.ascontiguousarray(embedding, DTYPES[original[HEAD]["dtype"]])

        ours = {name: np.asarray(x) for name, x in named.items() if name not in found}
        if ours:
            text[NOTE] = {
                "about": "This model has fast-weight memories; fwpkm_jax reads them from "
                f"{MEMORIES}. Other programs load the model without them.",
            }
        programs: dict[str, bytes] = {}
        if ours or model_type == HYBRID:
            # Of the run itself: saved memories belong to these, low-rank updates included.
            text[NOTE] = text.get(NOTE, {}) | {
                "model": to_json(dataclasses.replace(model, lora=None)),
                "lora": to_json(model.lora),
                "weights": fingerprint(run.model),
                "origin": f"step {run.step} of an exported run",
            }
            unread = unread_memory(model, model_type) if ours else None
            if unread is None:
                programs = model_programs(model_type)
                text["auto_map"] = auto_map(model_type)
            else:
                say(f"The folder has no program for PyTorch, which does not read {unread}.")
        with new_folder(folder) as partial:
            for file_name, content in (files | programs).items():
                with replacing(partial / file_name) as file:
                    file.write(content)
            _write_tensors(partial, tensors(), most_bytes)
            if ours:
                with replacing(partial / MEMORIES) as file:
                    write_tensors(file, ours, metadata={"format": NOTE})
            write_json(partial / "config.json", text)
            sizes = {"parameters": _size(run.params), "memory_parameters": _size(run.memory)}
            card = model_card(
                run_dir,
                name or folder.name,
                step=run.step,
                weights=weights,
                sizes=sizes,
                imported=kept,
                is_hybrid=model_type == HYBRID,
                in_pytorch=bool(programs),
                has_tokenizer=any(x in files for x in ("tokenizer.json", "tokenizer.model")),
                license_name=license_name,
            )
            with replacing(partial / CARD) as file:
                file.write(card.encode())
    if {*text.get("layer_types", ["full_attention"])} == {"linear_attention"}:
        say(
            "No layer of this model has attention, without which transformers cannot make a cache: "
            "call the model there with use_cache=False."
        )
    return folder


def push_model(
    run_dir: str | Path,
    name: str,
    *,
    folder: str | Path | None = None,
    step: int | Literal["best"] | None = None,
    weights: WhichWeights = "trained",
    private: bool = False,
    license_name: str | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Exports a checkpoint of a run and pushes it to the Hugging Face Hub, with a card.

    Args:
      run_dir: as in `export_model`.
      name: `owner/name` on the hub; the repository is made if it is not there.
      folder: a new folder that stays; None: one that is deleted.
      step: as in `load_run`.
      weights: as in `load_run`.
      private: whether a repository that is made can be seen by its owner alone.
      license_name: as in `export_model`.

    Returns:
      The address of the commit.

    Raises:
      FileExistsError: the folder exists.
      ImportError: the package huggingface_hub is not installed.
      ValueError: the run cannot be exported, or the name is none of the hub.
      OSError: nobody is logged in, the login may not write there, or the hub cannot be reached.
    """
    check_push(name)  # Before minutes of writing.
    with tempfile.TemporaryDirectory(prefix="export_", dir=Path(run_dir)) as own:
        whole = Path(own) / "model" if folder is None else Path(folder)
        options: Any = {"step": step, "weights": weights, "name": name}
        export_model(run_dir, whole, license_name=license_name, say=say, **options)
        return push_folder(whole, name, private=private)


def _size(arrays: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(arrays))


@contextlib.contextmanager
def _kept_files(run_dir: Path) -> Iterator[Path | None]:
    """What the import kept, of the run or of the one it is based on; None if nobody imported it."""
    directory = run_dir
    with contextlib.ExitStack() as held:
        while not os.path.lexists(directory / KEPT):
            base = read_experiment(directory).base
            if base is None:
                yield None
                return
            directory = held.enter_context(run_folder(base, checkpoints="none"))
        kept = directory / KEPT
        refuse_link(kept)
        if not kept.is_dir():
            raise OutsideFileError(kept, "is no folder", otherwise="import the model again")
        for name in ("config.json", TENSORS, HUB, *SMALL_FILES):
            refuse_link(kept / name)
        yield kept


def _described(experiment: Experiment) -> dict[str, Any]:
    """`config.json` of a run that nobody imported."""
    try:
        return config_text(experiment.model, context=experiment.data.length)
    except ValueError as error:
        no_family = error
    try:
        return hybrid_text(experiment.model, context=experiment.data.length)
    except ValueError as error:
        raise ValueError(f"{no_family} It is no hybrid either, for it has {error}") from error


def _tokenizer_files(experiment: Experiment, say: Callable[[str], None]) -> dict[str, bytes]:
    """The run's tokenizer by file name; says which one is meant where there is no file.

    A run's configuration may name any file or object that its reader may read, so what is exported
    is known to be a tokenizer.
    """
    name = getattr(experiment.data, "tokenizer", BYTES)
    if name == BYTES:
        return {}
    if name != MISTRAL_V1:
        remote = scheme_of(name) is not None
        path = Path(name).expanduser()
        try:
            if remote:
                content = read_small(name, most=MOST_SMALL)
            else:
                content = read_bytes(path, most=MOST_SMALL)
            load_tokenizer(name if remote else str(path))
        except FileNotFoundError:
            why = "is not there any more"
        except ImportError as error:
            why = f"is not looked at ({error})"
        else:
            return {path.name: content}
        say(f"The run's tokenizer, {name if remote else path}, {why}; put it into the folder.")
        return {}
    try:
        model = mistral_v1_model()
    except ImportError:
        say(
            f"The run's tokenizer is {MISTRAL_V1!r}, that of Mistral-7B-v0.1; put its "
            "tokenizer.model into the folder, or install mistral-common and export again."
        )
        return {}
    say(f"tokenizer.model is the run's tokenizer, {MISTRAL_V1!r}, that of Mistral-7B-v0.1.")
    return {"tokenizer.model": model}


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], most: int) -> None:
    """Files of at most so many bytes each, but for a larger tensor; several get an index."""
    files: list[tuple[Path, dict[str, None], int]] = []
    held: dict[str, np.ndarray] = {}

    def write() -> None:
        path = folder / f"part-{len(files)}"
        size = sum(x.nbytes for x in held.values())
        with replacing(path) as file:
            write_tensors(file, held, metadata={"format": "pt"})
        files.append((path, dict.fromkeys(held), size))
        held.clear()

    for name, array in tensors:
        if held and sum(x.nbytes for x in held.values()) + array.nbytes > most:
            write()
        held[name] = array
    write()
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return
    places = {}
    for number, (path, names, _) in enumerate(files, start=1):
        new = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / new)
        places |= dict.fromkeys(names, new)
    total = {"total_size": sum(size for _, _, size in files)}
    write_json(folder / INDEX, {"metadata": total, "weight_map": places})
