"""The door for files from outside: what every reader checks first, and the one error it raises.

A file that another person or program wrote may be damaged, cut short, or made to do harm. A reader
parses, compares shapes and sizes with the bytes that are there, and only then allocates. Whatever
is wrong ends in an `OutsideFileError`, one line that names file, place and way out.
"""

import contextlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from typing import IO, Any

MOST_JSON_BYTES = 2**23
"""Of a JSON file; parsed values may take thirty times as much."""
MOST_DEPTH = 100
"""Of lists and objects within each other in a JSON file."""
_MOST_SHOWN = 300
_WEB_ADDRESS = re.compile(r"(https?:/+)(?:[^/\s]*@)?([^?\s'\")]*)(?:\?[^\s'\")]*)?", re.I)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_POINTER = b"version https://git-lfs.github.com/spec/"


class OutsideFileError(ValueError):
    """A file from outside cannot be used: `PATH, PLACE PROBLEM; WAY OUT.`, always one line.

    Args:
      path: of the file.
      problem: what is wrong, beginning with a verb: "is damaged", "has the shape [2, 3]".
      place: in the file: a line, a key, a tensor.
      otherwise: what the user can do: "fetch it again".

    Example:
      >>> raise OutsideFileError("model.safetensors", "ends early", otherwise="fetch it again")
      Traceback (most recent call last):
      ...
      fwpkm_jax.io.untrusted.OutsideFileError: model.safetensors ends early; fetch it again.
    """

    def __init__(
        self, path: str | os.PathLike[str], problem: str, place: str = "", otherwise: str = ""
    ) -> None:
        super().__init__(os.fspath(path), problem, place, otherwise)  # Can be pickled.

    def __str__(self) -> str:
        path, problem, place, otherwise = self.args
        where = f"{path}, {shown(place)}" if place else path
        way_out = f"; {otherwise.rstrip('.')}" if otherwise else ""
        return printable(f"{where} {shown(problem, 2 * _MOST_SHOWN).rstrip('.')}{way_out}.")


def printable(text: str) -> str:
    """The text in one line, with control characters, also those of terminals, as escapes."""
    return "".join(
        x if x.isprintable() else " " if x == "\n" else x.encode("unicode_escape").decode()
        for x in text
    )


def shown(text: object, most: int = _MOST_SHOWN) -> str:
    """A text from a file as a message quotes it: in one line, cut after `most` characters."""
    whole = str(text)
    return printable(whole[:most]) + ("..." if len(whole) > most else "")


def without_login(text: str) -> str:
    """A message without the user part and the query of web addresses in it, which may be secrets.

    Example:
      >>> without_login("https://bob:secret@host/x?token=secret cannot be reached")
      'https://host/x cannot be reached'
    """
    return _WEB_ADDRESS.sub(r"\1\2", text)


@contextlib.contextmanager
def reading(
    path: str | os.PathLike[str],
    *,
    place: str = "",
    problem: str = "is damaged",
    otherwise: str = "fetch it again",
) -> Iterator[None]:
    """Turns whatever the parser in its body raises into an `OutsideFileError`.

    Only parsing belongs into the body: an error of the reader's own code would look like a fault of
    the file. A file that is missing stays a FileNotFoundError.

    Args:
      place: see `OutsideFileError`.
      problem: what is wrong; the parser's reason is added.
      otherwise: see `OutsideFileError`.
    """
    try:
        yield
    except (OutsideFileError, FileNotFoundError):
        raise
    except RecursionError as error:
        raise OutsideFileError(path, f"{problem}: it is nested too deeply", place, otherwise) from (
            error
        )
    except MemoryError as error:
        too_large = f"{problem}: it asks for more memory than there is"
        raise OutsideFileError(path, too_large, place, otherwise) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutsideFileError(path, f"cannot be read: {reason}", place, otherwise) from error
    except Exception as error:
        lost = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        reason = str(error) if isinstance(error, ValueError) else lost
        raise OutsideFileError(path, f"{problem} ({shown(reason)})", place, otherwise) from error


def size_of(path: str | os.PathLike[str], *, otherwise: str = "name a file") -> int:
    """Bytes of a file.

    Raises:
      FileNotFoundError: there is none.
      OutsideFileError: it is a directory, a pipe or a device, or cannot be looked at.
    """
    with reading(path, otherwise=otherwise):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = "is a directory" if stat.S_ISDIR(found.st_mode) else "is no file of bytes on a disk"
        raise OutsideFileError(path, kind, otherwise=otherwise)
    return found.st_size


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Refuses a link where what is read is passed on.

    By a link a stranger's folder could have other files of its reader's exported or shown.
    """
    if os.path.islink(path):
        raise OutsideFileError(path, "is a link", otherwise="put what it names in its place")


def open_file(path: str | os.PathLike[str], *, otherwise: str = "name a file") -> io.BufferedReader:
    """A file, opened to be read; what is refused is as in `size_of`."""
    size_of(path, otherwise=otherwise)  # A pipe would wait for its other end.
    with reading(path, otherwise=otherwise):
        return open(path, "rb")


def bounded_lines(
    file: IO[bytes], path: str | os.PathLike[str], *, otherwise: str = "delete the line"
) -> Iterator[bytes]:
    """The lines of a file that is open.

    Raises:
      OutsideFileError: a line has `MOST_JSON_BYTES` or more.
    """
    lines = iter(lambda: file.readline(MOST_JSON_BYTES), b"")
    for number, line in enumerate(lines, start=1):
        if len(line) == MOST_JSON_BYTES:
            raise OutsideFileError(path, "is too long", f"line {number}", otherwise)
        yield line


def read_bytes(
    path: str | os.PathLike[str], *, most: int, otherwise: str = "fetch it again"
) -> bytes:
    """The whole file.

    Raises:
      FileNotFoundError: there is none.
      OutsideFileError: it has more than `most` bytes, is no file, or cannot be read.
    """
    size = size_of(path, otherwise=otherwise)
    if size > most:
        problem = f"has {size:,} bytes, and at most {most:,} are expected"
        raise OutsideFileError(path, problem, otherwise=otherwise)
    with reading(path, otherwise=otherwise), open(path, "rb") as file:
        # The size anew, as it may have grown; `read` takes memory for all that it is asked for.
        return file.read(min(os.fstat(file.fileno()).st_size, most))


def read_text(path: str | os.PathLike[str], *, most: int, otherwise: str = "fetch it again") -> str:
    """The whole file as UTF-8; see `read_bytes`."""
    content = read_bytes(path, most=most, otherwise=otherwise)
    with reading(path, problem="is not UTF-8", otherwise=otherwise):
        return content.decode()


def read_json(
    path: str | os.PathLike[str],
    *,
    otherwise: str = "delete it",
    most: int = MOST_JSON_BYTES,
    kind: type | None = None,
    unique: bool = False,
) -> Any:
    """The value of a JSON file.

    Args:
      otherwise: what the user can do if it is damaged.
      kind: dict or list; None: any value.
      unique: no name may occur twice in an object.

    Raises:
      FileNotFoundError: there is none.
      OutsideFileError: it is damaged, too large, nested too deeply or of another kind.
    """
    content = read_bytes(path, most=most, otherwise=otherwise)
    return parse_json(content, path, otherwise=otherwise, kind=kind, unique=unique)


def parse_json(
    content: bytes | str,
    path: str | os.PathLike[str],
    *,
    place: str = "",
    otherwise: str = "fetch it again",
    kind: type | None = None,
    unique: bool = False,
) -> Any:
    """The value of a text that stands in a file; the arguments are those of `read_json`."""
    if is_pointer(content):
        refuse_pointer(path)
    with reading(path, place=place, problem="is not UTF-8", otherwise=otherwise):
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
    with reading(path, place=place, otherwise=otherwise):
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
        # Half a pair is no text, and cannot be written anywhere; bytes of UTF-8 hold none.
        if _SURROGATE.search(text) or not (isinstance(content, bytes) or text.isascii()):
            json.dumps(value, ensure_ascii=False).encode()
    if _is_too_deep(value):
        problem = f"is nested more than {MOST_DEPTH} deep"
        raise OutsideFileError(path, problem, place, otherwise)
    if kind is not None and not isinstance(value, kind):
        names = {dict: "object", list: "list"}
        problem = f"is {shown(json.dumps(value), 40)}; a JSON {names[kind]} is expected"
        raise OutsideFileError(path, problem, place, otherwise)
    return value


def is_pointer(content: bytes | str) -> bool:
    """Whether a file's first bytes are those of a git-lfs pointer, which stands for a file."""
    start = content[:100].encode() if isinstance(content, str) else content
    return start.startswith(_POINTER)


def refuse_pointer(path: str | os.PathLike[str]) -> None:
    """Raises the error of a file that is a git-lfs pointer."""
    raise OutsideFileError(
        path,
        "is a git-lfs pointer, not the file that it stands for",
        otherwise="run `git lfs pull` in its repository, or download the file itself",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        double = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it names {double!r} twice")
    return values


def _is_too_deep(value: Any) -> bool:
    """Whether lists and dicts lie more than `MOST_DEPTH` deep within each other."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        containers = [x for x in level if isinstance(x, dict | list)]
        if not containers:
            return False
        level = [
            inner
            for x in containers
            for inner in (x.values() if isinstance(x, dict) else x)
            if isinstance(inner, dict | list)
        ]
    return True
