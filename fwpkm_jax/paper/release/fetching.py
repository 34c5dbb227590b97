"""Fetches a checkpoint of the authors' release from the Hugging Face Hub."""

import contextlib
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from fwpkm_jax.interchange.hf.hub import HubFolder
from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.paper.release.layouts import (
    BIN,
    BIN_INDEX,
    LATEST,
    STATES,
    checkpoint_files,
    named_step,
)


def fetch_release(
    name: str, *, revision: str | None = None, others: Sequence[str] = ()
) -> HubFolder:
    """Fetches a checkpoint of the authors' release in the first layout that the hub has.

    Arguments and errors are those of `fetch_folder`; layouts are those of `layouts`.
    """
    model = HubFolder(name, revision)
    model.fetch(map(glob.escape, ["config.json", INDEX, BIN_INDEX, LATEST, *others]))
    for patterns in _layouts(model.folder):
        model.fetch(patterns)
        with contextlib.suppress(FileNotFoundError):
            checkpoint_files(model.folder)
            return model
    model.check_asked()
    raise ValueError(
        f"{name} at {model.revision} has none of {SINGLE}, {INDEX}, {BIN}, {BIN_INDEX} and "
        f"{STATES}; only checkpoints that the authors' code has written can be imported."
    )


def _layouts(folder: Path) -> Iterator[list[str]]:
    """Patterns of the files of one layout after the other, as `checkpoint_files` prefers them."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        yield [single]
        if (folder / index).is_file():
            yield [glob.escape(file) for file in set(named_files(folder, index=index).values())]
    # The second and third are there where a model is cut up, which is then refused.
    states = ("mp_rank_00", "mp_rank_01", "zero_pp_rank_0_mp_rank_00")
    yield [f"{part}_model_states.pt" for part in states]
    step = named_step(folder)
    steps = "global_step*" if step is None else glob.escape(step)
    yield [f"{steps}/{part}_model_states.pt" for part in states]
