"""Files and folders that are whole or absent, whatever happens while they are written.

Every writer of this package comes here, because a folder may be a stranger's: what lies in it may
be a link to somewhere else. Nothing is written through a link, and nothing is deleted or replaced
but the name that was asked for and what this module made itself. Until it is complete, a file has
a random name beside its own, made exclusively; a killed process leaves it, and the next session
that locks what the file belongs to removes it.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fwpkm_jax.io.untrusted import without_login
from fwpkm_jax.storage.addresses import scheme_of


def check_local(path: str | Path, name: str = "") -> None:
    """Raises ValueError for the address of a bucket or a server, which is no path of this machine.

    Args:
      path: what the user gave; a `Path` of an address counts, too.
      name: what the message calls it; "": nothing.
    """
    if scheme_of(path) is not None:
        given = repr(without_login(str(path)))
        given = f"{name}={given}" if name else given
        raise ValueError(
            f"{given} is an address, and files are read and written by paths of this machine only; "
            "mount the bucket (for example with gcsfuse) and give its path."
        )


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A new file that gets the name `path`, in place of what has it, once the body ends.

    If the body raises, the new file is gone and what was there before stays.

    Raises:
      OSError: it cannot be written.
      ValueError: `path` is an address.
    """
    path = Path(path)
    check_local(path)
    temporary = path.with_name(f"{_start(path)}{secrets.token_hex(8)}.tmp")
    number = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(number, "w+b") as file:
            yield file
            file.flush()
            os.fsync(number)  # Or the name may reach the disk before the contents.
            try:
                temporary.replace(path)
            except IsADirectoryError as error:  # It names the temporary file.
                raise IsADirectoryError(error.errno, error.strerror, str(path)) from None
        _to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def is_unfinished(found: Path, path: Path) -> bool:
    """Whether `found` is a file that `replacing(path)` had not finished."""
    name = re.escape(_start(path)) + r"[0-9a-f]{16}\.tmp"
    return re.fullmatch(name, found.name) is not None and found.parent == path.parent


def _start(path: Path) -> str:
    """How the names of a file begin while it is unfinished; not longer than a name may be."""
    return f".{path.name[:100]}."


def remove_unfinished(path: Path) -> None:
    """Removes what killed processes left of earlier writes of a file.

    The caller holds a lock that all writers of the file need.
    """
    with contextlib.suppress(OSError):
        for found in path.parent.iterdir():
            facts = found.lstat()
            plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
            if plain and is_unfinished(found, path):
                found.unlink()


def _to_disk(path: Path) -> None:
    """Returns once a file, or the names in a folder, are on disk; not every file system can."""
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextlib.contextmanager
def new_folder(folder: str | Path, *, may_be_empty: bool = False) -> Iterator[Path]:
    """A new folder that gets the name `folder` once the body ends.

    If the body raises, the folder is gone. A killed process leaves one with a random name,
    `FOLDER.partial-...`, which nobody removes: delete it once no such command runs.

    Args:
      folder: that is to be there.
      may_be_empty: an empty folder may have the name, and is replaced.

    Raises:
      FileExistsError: there is something of that name, also if it appeared meanwhile.
      ValueError: `folder` is an address.
      OSError: it cannot be made.
    """
    folder = Path(folder)
    check_local(folder)
    if not may_be_empty:
        check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(8)}")
    partial.mkdir()
    try:
        yield partial
        _tree_to_disk(partial)
        if not may_be_empty:
            check_new(folder)
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _exists(folder) from error
            raise
        _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_new(folder: Path) -> None:
    """Raises FileExistsError if anything has this name."""
    if os.path.lexists(folder):
        raise _exists(folder)


def _exists(folder: Path) -> FileExistsError:
    return FileExistsError(f"{folder} exists; choose a folder that does not.")


def _tree_to_disk(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for name in (*files, ""):
            _to_disk(Path(place, name))


def open_own(path: str | Path, flags: int) -> int:
    """The descriptor of a plain file that stays in its place: a lock, a log, a file in parts.

    Args:
      flags: as for `os.open`; a link is never followed, whatever they are.

    Raises:
      ValueError: there is a link, a second name of another file, or no file at all in its place.
      OSError: it cannot be opened.
    """
    path = Path(path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        number = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_plain_file(path) from error
        raise
    facts = os.fstat(number)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(number)
        raise _no_plain_file(path)
    return number


def _no_plain_file(path: Path) -> ValueError:
    what = "is a link" if path.is_symlink() else "is not a plain file with one name"
    return ValueError(f"{path} {what}, and nothing is written through it; remove it and try again.")


def own_folder(path: str | Path) -> Path:
    """A folder in another one, made if it is not there; never a link to somewhere else.

    Raises:
      ValueError: something else has this name.
      OSError: it cannot be made.
    """
    path = Path(path)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not stat.S_ISDIR(path.lstat().st_mode):
        what = "is a link" if path.is_symlink() else "is a file"
        raise ValueError(
            f"{path} {what}; a run writes inside its own folder only. Put a folder in its place."
        )
    return path


def write_text(path: Path, text: str) -> None:
    """Writes a text: a reader finds the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes a value as `write_text` does.

    Raises:
      ValueError: there is a NaN or an infinity in it.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
