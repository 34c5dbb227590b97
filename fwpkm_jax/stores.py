"""A folder in a bucket: its objects by name, and writes that hold only if nobody else wrote.

An object appears when its upload is complete, and never in part: that is what S3, Google Cloud
Storage and `memory://` have in common. What needs several objects is therefore written by a last
one that names the others.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from fwpkm_jax.addresses import address_of, open_store, scheme_of, store_error
from fwpkm_jax.outside_files import OutsideFileError

_memory_writes = threading.Lock()


class Listed(NamedTuple):
    """What a store says of an object.

    Attributes:
      size: in bytes.
      version: a text that another content of the object does not have.
    """

    size: int
    version: str


class Store:
    """The objects below an address.

    Attributes:
      address: without a slash at the end.
    """

    def __init__(self, address: str) -> None:
        """Opens a folder; asks no server.

        Raises:
          ValueError: the address is of no bucket, names no folder in it, or its package is missing.
        """
        self.address = re.sub(r"(?<!:)/+$", "", address_of(address))
        self._files, self._root = open_store(self.address)
        self._scheme = scheme_of(self.address)
        if not self._root.strip("/") or (
            self._scheme != "memory" and "/" not in self._root.strip("/")
        ):
            raise ValueError(
                f"{address} names a bucket and no folder in it; write {self.address}/NAME."
            )

    def __str__(self) -> str:
        return self.address

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except (OutsideFileError, FileExistsError):
            raise
        except Exception as error:  # Each client has kinds of its own.
            raise store_error(f"{self.address}/{name}" if name else self.address, error) from error

    def sizes(self) -> dict[str, int]:
        """Bytes of every object by name, sorted. Raises as `listed` does."""
        return {name: found.size for name, found in self.listed().items()}

    def listed(self) -> dict[str, Listed]:
        """Size and version of every object by name, sorted.

        Raises:
          OutsideFileError: the store cannot be asked; or an object's name leads out of the folder.
        """
        with self._asking():
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        start = self._root.strip("/") + "/"
        names = {}
        for path, info in sorted(found.items()):
            name = path.strip("/").removeprefix(start)
            if name and info["type"] == "file" and path.strip("/").startswith(start):
                names[checked_name(name, self.address)] = _listed(info)
        return names

    def listed_one(self, name: str) -> Listed:
        """Size and version of an object. Raises FileNotFoundError if there is none."""
        with self._asking(name):
            self._files.invalidate_cache()
            return _listed(self._files.info(self._path(name)))

    def read(self, name: str) -> bytes:
        """An object's content. Raises FileNotFoundError if there is none."""
        with self._asking(name):
            return self._files.cat_file(self._path(name))

    def starts(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """First bytes of objects, asked for at once; of one that is gone, there is nothing.

        Args:
          sizes: how many bytes of each object, at least one and not more than it has.
        """
        paths = [self._path(name) for name in sizes]
        found = {}
        with self._asking():
            contents = self._files.cat_ranges(
                paths, [0] * len(paths), list(sizes.values()), on_error="return"
            )
            for name, content in zip(sizes, contents, strict=True):
                if isinstance(content, FileNotFoundError):
                    continue
                if isinstance(content, Exception):
                    raise content
                found[name] = bytes(content)
        return found

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, in place of the one of this name."""
        with self._asking(name):
            self._files.pipe_file(self._path(name), content)

    def upload(self, file: Path, name: str) -> None:
        """Writes a file of this machine as an object."""
        with self._asking(name):
            if not file.is_file():
                raise OutsideFileError(file, "is gone")
            if self._scheme == "memory":  # Its `put_file` shows the object before it is whole.
                self._files.pipe_file(self._path(name), file.read_bytes())
            else:
                self._files.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Writes an object to a new file of this machine."""
        with self._asking(name):
            self._files.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with self._asking(name), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def versioned(self, name: str) -> tuple[bytes, str] | None:
        """An object's content and its version; None if there is none.

        If it is replaced meanwhile, the version is the older one, which `replace` then refuses.
        """
        with self._asking(name):
            self._files.invalidate_cache()
            try:
                info = self._files.info(self._path(name))
                content = self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
        return content, str(info.get("generation") or info.get("ETag") or content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one of this name; whether it did.

        On S3 by `If-None-Match: *`, on Google Cloud Storage by `ifGenerationMatch=0`.
        """
        with self._asking(name):
            try:
                if self._scheme == "gs":
                    self._post(name, content, "0")
                elif self._scheme == "s3":
                    self._put(name, content, IfNoneMatch="*")
                else:
                    with _memory_writes:
                        self._files.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return self._is(name, content)
        return True

    def replace(self, name: str, content: bytes, version: str) -> bool:
        """Writes an object if the one of this name still has this version; whether it did.

        On S3 by `If-Match`, on Google Cloud Storage by `ifGenerationMatch`.
        """
        with self._asking(name):
            try:
                if self._scheme == "gs":
                    self._post(name, content, version)
                elif self._scheme == "s3":
                    self._put(name, content, IfMatch=version)
                else:
                    with _memory_writes:
                        found = self.versioned(name)
                        if found is None or found[1] != version:
                            return False
                        self._files.pipe_file(self._path(name), content)
            except (FileExistsError, FileNotFoundError):
                return self._is(name, content)
        return True

    def _is(self, name: str, content: bytes) -> bool:
        """Whether an object has this content: a write may count although its answer was lost."""
        found = self.versioned(name)
        return found is not None and found[0] == content

    def _put(self, name: str, content: bytes, **condition: str) -> None:
        bucket, key, _ = self._files.split_path(self._path(name))
        try:
            self._files.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)
        except FileExistsError:
            raise
        except OSError as error:
            cause = getattr(error.__cause__, "response", None) or {}
            if cause.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                raise FileExistsError(name) from error
            raise

    def _post(self, name: str, content: bytes, generation: str) -> None:
        bucket, key, _ = self._files.split_path(self._path(name))
        self._files.call(
            "POST",
            f"{self._files._location}/upload/storage/v1/b/{quote(bucket)}/o",
            uploadType="media",
            name=key,
            ifGenerationMatch=generation,
            headers={"Content-Type": "application/json"},
            data=content,
            json_out=True,
        )


def _listed(info: Mapping[str, Any]) -> Listed:
    created = info.get("created")  # Of `memory://`, as a number or a date.
    made = created.timestamp() if isinstance(created, datetime.datetime) else created
    return Listed(int(info["size"]), str(info.get("generation") or info.get("ETag") or made))


def checked_name(name: str, where: str) -> str:
    """The name of an object as a path below a folder.

    Raises:
      OutsideFileError: it leads out of the folder.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name:
        raise OutsideFileError(
            where, f"holds an object named {name!r}, which is no path in a folder"
        )
    return name
