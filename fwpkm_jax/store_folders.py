"""Folders in a bucket that are made or read as folders of this machine: exports and imports."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fwpkm_jax.addresses import scheme_of
from fwpkm_jax.stores import Store

_LAST = "config.json"


@contextlib.contextmanager
def made_in(folder: str | Path) -> Iterator[Path]:
    """The path at which the body makes a folder: `folder`, or a place from which it goes there.

    Of a folder in a bucket, `config.json` is written last: readers need it, so none takes what a
    killed upload left for a whole folder.

    Raises:
      FileExistsError: the bucket holds objects there; nothing was made.
      OSError: the store cannot be asked.
    """
    if scheme_of(folder) is None:
        yield Path(folder)
        return
    store = Store(str(folder))
    if store.sizes():
        raise FileExistsError(f"{store} exists; choose another name.")
    with tempfile.TemporaryDirectory(prefix="fwpkm-made-") as place:
        made = Path(place) / "folder"
        yield made
        files = [file.relative_to(made).as_posix() for file in made.rglob("*") if file.is_file()]
        for name in sorted(files, key=lambda name: (name == _LAST, name)):
            store.upload(made / name, name)


@contextlib.contextmanager
def fetched(folder: str | Path) -> Iterator[Path]:
    """A folder as it is on this machine; of one in a bucket, a copy that ends with the context.

    Raises:
      FileNotFoundError: the bucket holds no whole folder there.
      OSError: the store cannot be asked.
    """
    if scheme_of(folder) is None:
        yield Path(folder)
        return
    store = Store(str(folder))
    names = store.sizes()
    if _LAST not in names:
        raise FileNotFoundError(f"{store}/{_LAST} does not exist; {store} holds no whole folder.")
    with tempfile.TemporaryDirectory(prefix="fwpkm-fetched-") as place:
        for name in names:
            file = Path(place) / name
            file.parent.mkdir(parents=True, exist_ok=True)
            store.download(name, file)
        yield Path(place)
