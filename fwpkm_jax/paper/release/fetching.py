"""Fetches a checkpoint of the authors' release from the Hugging Face Hub."""

import contextlib
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from fwpkm_jax.interchange.hf.hub import MOST_SMALL, HubFolder
from fwpkm_jax.interchange.tensor_files import INDEX, SINGLE, named_files
from fwpkm_jax.paper.release.layouts import BIN, BIN_INDEX, checkpoint_files


def fetch_release(
    name: str, *, revision: str | None = None, others: Sequence[str] = ()
) -> HubFolder:
    """Fetches a checkpoint of the authors' release in the first layout that the hub has.

    Arguments and errors are those of `fetch_folder`; layouts are those of `layouts`.
    """
    model = HubFolder(name, revision)
    model.fetch(map(glob.escape, ["config.json", INDEX, BIN_INDEX, *others]), most=MOST_SMALL)
    for patterns in _layouts(model.folder):
        model.fetch(patterns)
        with contextlib.suppress(FileNotFoundError):
            checkpoint_files(model.folder)
            return model
    model.check_asked()
    raise ValueError(
        f"{name} at {model.revision} has none of {SINGLE}, {INDEX}, {BIN} and {BIN_INDEX}; only "
        "checkpoints that the authors' code has written can be imported."
    )


def _layouts(folder: Path) -> Iterator[list[str]]:
    """Patterns of the files of one layout after the other, as `checkpoint_files` prefers them."""
    for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
        yield [single]
        if (folder / index).is_file():
            yield [glob.escape(file) for file in set(named_files(folder, index=index).values())]
