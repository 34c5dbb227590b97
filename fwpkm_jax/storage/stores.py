"""A folder in a bucket: its objects by name, and writes that hold only if nobody else wrote.

An object appears when its upload is complete, and never in part: that is what S3, Google Cloud
Storage and `memory://` have in common. What needs several objects is therefore written by a last
one that names the others. Whatever asks a store that does not answer raises `StoreError`.
"""

import contextlib
import datetime
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

from fwpkm_jax.io.untrusted import MOST_JSON_BYTES, OutsideFileError
from fwpkm_jax.storage.addresses import (
    TRIES,
    Answer,
    Asked,
    address_of,
    ask,
    check_size,
    content_of,
    open_store,
    scheme_of,
)

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

    def __init__(self, address: str, *, tries: int = TRIES) -> None:
        """Opens a folder; asks no server.

        Args:
          address: of the folder.
          tries: how often the server is asked before an error counts.

        Raises:
          ValueError: the address is of no bucket, names no folder in it, or its package is missing.
        """
        self._tries = tries
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

    def _ask(self, call: Callable[[], Answer], name: str = "", doing: Asked = "read") -> Answer:
        address = f"{self.address}/{name}" if name else self.address
        return ask(address, call, doing=doing, tries=self._tries)

    def sizes(self) -> dict[str, int]:
        """Bytes of every object by name, sorted. Raises as `listed` does."""
        return {name: found.size for name, found in self.listed().items()}

    def listed(self) -> dict[str, Listed]:
        """Size and version of every object by name, sorted.

        Raises:
          OutsideFileError: an object's name leads out of the folder.
        """

        def find() -> dict[str, Any]:
            self._files.invalidate_cache()
            try:
                return self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}

        # Asked twice before it counts as empty: a run that is not seen would be begun anew.
        found = self._ask(find, doing="listed") or self._ask(find, doing="listed")
        start = self._root.strip("/") + "/"
        names = {}
        for path, info in sorted(found.items()):
            name = path.strip("/").removeprefix(start)
            if name and info["type"] == "file" and path.strip("/").startswith(start):
                names[checked_name(name, self.address)] = _listed(info)
        return names

    def listed_one(self, name: str) -> Listed:
        """Size and version of an object. Raises FileNotFoundError if there is none."""
        return self._ask(lambda: _listed(self._info(name)), name)

    def _info(self, name: str) -> Mapping[str, Any]:
        self._files.invalidate_cache()
        return self._files.info(self._path(name))

    def read(self, name: str, *, most: int = MOST_JSON_BYTES) -> bytes:
        """An object's content. Raises FileNotFoundError if there is none; see `versioned`."""
        found = self.versioned(name, most=most)
        if found is None:
            raise FileNotFoundError(f"There is no {self}/{name}; check the address.")
        return found[0]

    def starts(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """First bytes of objects, asked for at once; those that are gone are left out.

        Args:
          sizes: how many bytes of each object, at least one and not more than it has.
        """
        paths = [self._path(name) for name in sizes]

        def read() -> dict[str, bytes]:
            contents = self._files.cat_ranges(
                paths, [0] * len(paths), list(sizes.values()), on_error="return"
            )
            found = {}
            for (name, size), content in zip(sizes.items(), contents, strict=True):
                if isinstance(content, FileNotFoundError):
                    continue
                if isinstance(content, Exception):
                    raise content
                check_size(len(content), size)
                found[name] = bytes(content)
            return found

        return self._ask(read)

    def write(self, name: str, content: bytes) -> None:
        """Writes an object, in place of the one of this name."""
        self._ask(lambda: self._files.pipe_file(self._path(name), content), name, "written")

    def upload(self, file: Path, name: str) -> None:
        """Writes a file of this machine as an object.

        Raises:
          FileNotFoundError: there is no such file.
        """

        def put() -> None:
            if self._scheme == "memory":  # Its `put_file` shows the object before it is whole.
                self._files.pipe_file(self._path(name), file.read_bytes())
            else:
                self._files.put_file(str(file), self._path(name))

        try:
            self._ask(put, name, "written")
        except FileNotFoundError:
            if file.is_file():
                raise
            raise FileNotFoundError(f"{file} is gone.") from None

    def download(self, name: str, file: Path, *, expected: int | None = None) -> None:
        """Writes an object to a new file here.

        Args:
          name: of the object.
          file: its path here.
          expected: bytes that it must have.

        Raises:
          FileNotFoundError: it is gone.
          OutsideFileError: it has another number of bytes.
        """

        def get() -> None:
            size = int(self._info(name)["size"])
            if expected is not None and size != expected:
                problem = f"has {size:,} bytes, and {expected:,} are expected"
                raise OutsideFileError(f"{self}/{name}", problem)
            self._files.get_file(self._path(name), str(file), callback=_upto(size))
            check_size(file.stat().st_size, size)

        self._ask(get, name)

    def remove(self, name: str) -> None:
        """Removes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: self._files.rm_file(self._path(name)), name, "removed")

    def versioned(self, name: str, *, most: int = MOST_JSON_BYTES) -> tuple[bytes, str] | None:
        """An object's content and its version; None if there is none.

        If it is replaced meanwhile, the version is the older one, which `replace` then refuses.

        Raises:
          OutsideFileError: it has more than `most` bytes.
        """

        def read() -> tuple[bytes, str]:
            info = self._info(name)
            path = self._path(name)
            content = content_of(f"{self}/{name}", self._files, path, info, most=most)
            version = info.get("generation") or info.get("ETag") or content.decode("latin-1")
            return content, str(version)

        try:
            return self._ask(read, name)
        except FileNotFoundError:
            return None

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless there is one of this name; whether it did.

        On S3 by `If-None-Match: *`, on Google Cloud Storage by `ifGenerationMatch=0`.

        Raises:
          FileNotFoundError: there is no such bucket.
        """

        def create() -> None:
            if self._scheme == "gs":
                self._post(name, content, "0")
            elif self._scheme == "s3":
                self._put(name, content, IfNoneMatch="*")
            else:
                with _memory_writes:
                    self._files.pipe_file(self._path(name), content, mode="create")

        return self._written(create, name, content)

    def replace(self, name: str, content: bytes, version: str) -> bool:
        """Writes an object if the one of this name still has this version; whether it did.

        On S3 by `If-Match`, on Google Cloud Storage by `ifGenerationMatch`.
        """

        def replace() -> None:
            if self._scheme == "gs":
                self._post(name, content, version)
            elif self._scheme == "s3":
                self._put(name, content, IfMatch=version)
            else:
                with _memory_writes:
                    if self._files.cat_file(self._path(name)) != version.encode("latin-1"):
                        raise FileExistsError(name)
                    self._files.pipe_file(self._path(name), content)

        try:
            return self._written(replace, name, content)
        except FileNotFoundError:  # It was removed meanwhile.
            return False

    def _written(self, write: Callable[[], None], name: str, content: bytes) -> bool:
        """Whether a write on a condition was made; it may count although its answer was lost."""
        try:
            self._ask(write, name, "written")
        except FileExistsError:
            found = self.versioned(name)
            return found is not None and found[0] == content
        return True

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


def _upto(size: int) -> Any:
    """Ends a download that brings more bytes than the store said."""
    from fsspec.callbacks import Callback

    def check(_: object, come: int) -> None:
        if come > size:
            check_size(come, size)

    return Callback(hooks={"check": check})


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
