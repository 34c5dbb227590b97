"""Knows text by the content of its files, so that a run is resumed with the text it was made of."""

import hashlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwpkm_jax.io.untrusted import open_file

FILES = "files"
"""Name of the files' identities in what a data position says of its source."""
WHOLE = 2**30
"""Bytes up to which every byte of a file counts; of a larger one blocks all over it do."""
BLOCKS, BLOCK = 2**14, 2**12
"""Number and bytes of these blocks: 64 MiB."""
MOST_NAMED = 256
"""Files of a source that are kept one by one; of more, all together."""


def identity(file: Path, *, whole: int | None = None, blocks: int | None = None) -> str:
    """A hash of a file's content; a tokenised file's index counts too.

    Of a file of more than `whole` bytes the size, both ends and `blocks` blocks spread evenly over
    it are hashed. Text that was changed between these blocks alone is taken for the same.

    Args:
      whole: None: `WHOLE`.
      blocks: None: `BLOCKS`.
    """
    whole, blocks = WHOLE if whole is None else whole, BLOCKS if blocks is None else blocks
    digest = hashlib.sha256()
    for part in (file, file.with_suffix(".idx")) if file.suffix.lower() == ".bin" else (file,):
        with open_file(part) as content:
            size = os.fstat(content.fileno()).st_size
            digest.update(f"{size} ".encode())
            if size <= whole:
                while block := content.read(2**20):
                    digest.update(block)
                continue
            for number in range(blocks):
                content.seek(number * (size - BLOCK) // (blocks - 1))
                digest.update(content.read(BLOCK))
    return digest.hexdigest()


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the file, if text is not that of a saved data position.

    A file may have another name or lie elsewhere.
    """
    changed = [
        f"{name}: {saved[name]} -> {now.get(name)}"
        for name in saved
        if name != FILES and saved[name] != now.get(name)
    ]
    if FILES in now:
        changed += _changed_files(saved.get(FILES, {}), now[FILES])
    if changed:
        raise ValueError(
            "The text has changed since the run was saved, so it would go on with other data "
            f"({'; '.join(changed)}); put the old files back, or start a new run."
        )


def _changed_files(saved: Any, now: Mapping[str, Any]) -> list[str]:
    """The first file of each split that is not the one it was."""
    changed = []
    for split in now:
        before = [tuple(file) for source in saved.get(split, []) for file in source]
        there = [tuple(file) for source in now[split] for file in source]
        if [digest for _, digest in before] == [digest for _, digest in there]:
            continue
        pairs = itertools.zip_longest(before, there)
        old, new = next((old, new) for old, new in pairs if (old and old[1]) != (new and new[1]))
        if new is None:
            what = f"{old[0]} is gone"
        else:
            what = f"{new[0]} has other content" if old else f"{new[0]} was not there"
        changed.append(f"{split} text: {what}")
    return changed
