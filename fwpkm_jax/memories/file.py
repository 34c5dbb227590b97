"""One file of named arrays: whole or absent on disk, with a checksum of everything in it."""

import errno
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.io.atomic import replacing
from fwpkm_jax.io.safetensors import SafetensorsFile, write_tensors
from fwpkm_jax.io.untrusted import OutsideFileError, parse_json, shown

FORMAT = "fwpkm_jax memory 1"
SUFFIX = ".safetensors"


def write(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    *,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Writes a file under its name once it is complete on disk.

    Args:
      path: of the file, which is replaced if it is there.
      arrays: by name.
      facts: JSON values.
      check: called just before the file gets its name; if it raises, what was there before stays.

    Returns:
      The file's checksum, 64 hex digits.

    Raises:
      OSError: it cannot be written; what was there before stays.
    """
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    total = checksum(arrays, text)
    metadata = {"format": FORMAT, "checksum": total, "facts": text}
    try:
        with replacing(path) as file:
            write_tensors(file, arrays, metadata=metadata)
            check()
    except OSError as error:
        raise OSError(
            error.errno or errno.EIO,
            f"The memory cannot be written ({error.strerror or error}); what was saved before is "
            "unchanged",
            str(path),
        ) from error
    return total


def read_facts(path: Path) -> tuple[dict[str, Any], str]:
    """A file's facts and the checksum that it states; the arrays are not read.

    Raises:
      ValueError: it is damaged, or no memory.
    """
    metadata = SafetensorsFile(path, otherwise=_WAY_OUT).metadata
    return _facts(path, metadata), metadata["checksum"]


def read(path: Path, *, expected: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's facts and arrays, after a check of its checksum.

    Args:
      path: of the file.
      expected: the checksum that it must have; None: the one that it states.

    Raises:
      ValueError: it is damaged, or no memory, or another file than expected.
    """
    file = SafetensorsFile(path, otherwise=_WAY_OUT)
    metadata = file.metadata
    facts = _facts(path, metadata)
    arrays = {name: file.read(name) for name in file}
    found = checksum(arrays, metadata["facts"])
    if found != metadata["checksum"]:
        problem = "is damaged: its contents are not what was saved"
        raise OutsideFileError(path, problem, otherwise=_WAY_OUT)
    if expected is not None and found != expected:
        raise ValueError(f"{path} is another memory than the one that was saved under this name.")
    return facts, arrays


def checksum(arrays: Mapping[str, np.ndarray], text: str = "") -> str:
    """sha256 over names, dtypes, shapes and bytes of arrays and a text, as 64 hex digits."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        x = np.ascontiguousarray(arrays[name])
        total.update(f"\n{name} {x.dtype} {arrays[name].shape}\n".encode())
        total.update(x.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _facts(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    found = metadata.get("format")
    if found != FORMAT:
        raise OutsideFileError(
            path,
            f"has the format {shown(found, 60)!r}, not {FORMAT!r}: it is no memory that this "
            "version saved",
            otherwise=_WAY_OUT,
        )
    facts = parse_json(
        metadata.get("facts", ""), path, place="its facts", otherwise=_WAY_OUT, kind=dict
    )
    wrong = [
        *(name for name, is_right in _KINDS.items() if not is_right(facts.get(name))),
        *(name for name in ("base", "note") if name not in facts),  # Either may be null.
        *(["checksum"] if not _CHECKSUM.fullmatch(metadata.get("checksum", "")) else []),
    ]
    if wrong:
        raise OutsideFileError(
            path, f"is damaged: it has no {wrong[0]}, or a wrong one", otherwise=_WAY_OUT
        )
    return facts


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_WAY_OUT = "delete it, or put back a copy"
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("saved", "origin", "weights"), lambda x: isinstance(x, str)),
    "keep": lambda x: x in ("all", "memory"),
    "documents": lambda x: isinstance(x, bool),
    "model": lambda x: isinstance(x, dict),
    "num_read": lambda x: isinstance(x, list) and all(map(_is_count, x)),
    "parts": lambda x: (
        isinstance(x, dict) and all(part in ("same", "rows", "whole") for part in x.values())
    ),
    "rows": lambda x: (
        isinstance(x, dict)
        and all(isinstance(n, list) and len(n) == 2 and all(map(_is_count, n)) for n in x.values())
    ),
    "base": lambda x: (
        x is None
        or (
            isinstance(x, dict)
            and isinstance(x.get("name"), str)
            and isinstance(x.get("checksum"), str)
            and _CHECKSUM.fullmatch(x["checksum"]) is not None
        )
    ),
}
"""What each of a memory's facts is, beside the note, which may be any value."""
