"""Addresses of files outside this machine: `gs://`, `s3://` and `memory://`, through fsspec.

`gs://bucket/path` needs the package gcsfs and `s3://bucket/path` the package s3fs (extra
`buckets`); both find logins and endpoints as their own documentation says. `memory://path` lies in
this process and ends with it.
"""

import errno
import functools
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from fwpkm_jax.io.untrusted import OutsideFileError, read_bytes, shown, without_login

TRIES = 5
"""How often a store is asked before what it raises counts."""
FIRST_WAIT = 0.5
"""Seconds before it is asked again for the first time; each further wait is twice the last."""
Asked = Literal["read", "written", "listed", "removed"]
Answer = TypeVar("Answer")
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def scheme_of(path: str | Path) -> str | None:
    """`s3` of `s3://bucket/path`, also where it is a `Path`; None for a path of this machine."""
    found = _ADDRESS.match(str(path))
    return found[1].lower() if found else None


def address_of(path: str | Path) -> str:
    """A path as text; of an address that was made a `Path`, with both slashes again."""
    if scheme_of(path) is None:
        return str(path)
    return re.sub(r":/(?!/)", "://", str(path), count=1)


def check_store(address: str, name: str = "") -> None:
    """Raises ValueError for an address that is of no bucket.

    Args:
      address: what the user gave.
      name: what the message calls it; "": nothing.
    """
    if scheme_of(address) not in _PACKAGES or "://" not in address:
        given = repr(without_login(address))
        given = f"{name}={given}" if name else given
        raise ValueError(
            f"{given} is an address of a kind that is not read; use gs://, s3:// or memory://, or "
            "a path of this machine."
        )


def open_store(address: str) -> tuple[Any, str]:
    """The file system of an address, from fsspec, and the path in it.

    Raises:
      ValueError: the address is of no bucket, or its package is not installed.
    """
    address = address_of(address)
    check_store(address)
    scheme = scheme_of(address)
    assert scheme is not None
    store = _file_system(scheme)
    # An object may have been replaced by another program since it was last seen.
    store.invalidate_cache()
    return store, store._strip_protocol(address)


@functools.cache
def _file_system(scheme: str) -> Any:
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError as error:
        raise ValueError(
            f"{scheme}:// is read and written with the package {_PACKAGES[scheme]}, which is not "
            "installed; in a checkout of fwpkm_jax run: pip install -e '.[buckets]'"
        ) from error


class StoreError(OSError):
    """A store could not be asked, or refused to answer: this says nothing about what it holds."""


def ask(
    address: str, call: Callable[[], Answer], *, doing: Asked = "read", tries: int = TRIES
) -> Answer:
    """What a store's client answers; an answer that fails for a moment is asked for again.

    Args:
      address: of what is asked for, for messages.
      call: asks; what it does may be done twice, as its answer may be lost.
      doing: what the message says of the store.
      tries: how often it is asked; the waits between grow from `FIRST_WAIT`, each twice the last.

    Raises:
      StoreError: it did not answer, or refused.
      FileNotFoundError: there is no such object.
      FileExistsError: `call` raised it.
    """
    for number in range(1, tries + 1):
        try:
            return call()
        except (OutsideFileError, FileExistsError):
            raise
        except Exception as error:  # Each client has kinds of its own.
            if number == tries or _is_lasting(error):
                raise store_error(address, error, doing=doing) from error
            time.sleep(FIRST_WAIT * 2 ** (number - 1))
    raise AssertionError("at least one try")


def _is_lasting(error: Exception) -> bool:
    """Whether an error would come again: of what was asked for, a login, or this machine's disk."""
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return True
    return isinstance(
        error,
        FileNotFoundError
        | PermissionError
        | IsADirectoryError
        | NotADirectoryError
        | TypeError
        | AttributeError
        | NotImplementedError
        | ImportError,
    )


def read_small(place: str | Path, *, most: int) -> bytes:
    """The content of a file of this machine, or of one object.

    Raises:
      FileNotFoundError: there is none.
      OutsideFileError: it has more than `most` bytes.
      StoreError: the store cannot be asked.
      ValueError: see `open_store`.
    """
    if scheme_of(place) is None:
        return read_bytes(place, most=most)
    address = address_of(place)
    store, path = open_store(address)
    return ask(address, lambda: content_of(address, store, path, store.info(path), most=most))


def content_of(address: str, store: Any, path: str, info: Mapping[str, Any], *, most: int) -> bytes:
    """The content of a small object; not more is asked for than its facts say.

    Args:
      address: of it, for messages.
      store: from `open_store`, with the path in it.
      info: what the store says of it.
      most: bytes that are read.

    Raises:
      OutsideFileError: it has more than `most` bytes.
      ConnectionError: other bytes came, after which a store is asked again.
    """
    size = int(info["size"])
    if size > most:
        problem = f"has {size:,} bytes, and at most {most:,} are expected"
        raise OutsideFileError(address, problem, otherwise="put the right one in its place")
    content = store.cat_file(path, start=0, end=size + 1) if size else b""
    check_size(len(content), size)
    return content


def check_size(found: int, expected: int) -> None:
    """Raises an error after which a store is asked again: a connection may end too early."""
    if found != expected:
        raise ConnectionError(f"{found} of {expected} bytes came")


def store_error(address: str, error: Exception, *, doing: Asked = "read") -> OSError:
    """What a store raised, as one line that names the address."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"There is no {address}; check the address.")
    reason = shown(str(error) or type(error).__name__, 200)
    return StoreError(
        f"{address} cannot be {doing} ({type(error).__name__}: {reason}); check the address, the "
        "login and the connection."
    )
