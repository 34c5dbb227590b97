"""Files of text wherever they lie: on this machine, in a bucket, in a data set of the hub."""

import abc
import gzip
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from fwpkm_jax.data.identity import MOST_NAMED, WHOLE, identity
from fwpkm_jax.data.streams.hub import HUB, HubName, check_hub_name, fetch_file, list_files
from fwpkm_jax.data.streams.names import (
    PACKAGED,
    below,
    chosen,
    fixed_part,
    is_named,
    kind_of,
)
from fwpkm_jax.io.untrusted import is_pointer, open_file, reading, refuse_pointer, size_of
from fwpkm_jax.literals import some
from fwpkm_jax.storage.addresses import check_store, open_store, scheme_of, store_error

_READ_AHEAD = 2**22

# Of sources that are too large to be hashed whole.
_SAMPLED = {"whole": 2**20, "blocks": 2**8}


@dataclass(frozen=True)
class AbstractDataFile(abc.ABC):
    """A file of text.

    Attributes:
      name: what messages call it.
    """

    name: str

    @property
    def kind(self) -> str:
        """The end of its name; `names.KINDS` are read."""
        return kind_of(self.name)

    @property
    def short_name(self) -> str:
        """Its name without folders."""
        return self.name.rpartition("/")[2]

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes."""

    @abc.abstractmethod
    def open(self) -> IO[bytes]:
        """The content, which can be read from any byte on; it is not read before it is used."""

    def open_at(self, byte: int) -> IO[bytes]:
        """The content from a byte on; of a compressed file, a byte of what it holds.

        Raises:
          OutsideFileError: it is a pointer to a file that was not fetched, or cannot be read.
        """
        with reading(self.name):
            content = self.open()
            if is_pointer(content.read(100)):
                content.close()
                refuse_pointer(self.name)
            content.seek(0)
            if self.kind.endswith(".gz"):
                content = cast(IO[bytes], _Gzip(content))
            content.seek(byte)
        return content

    @abc.abstractmethod
    def identity(self, *, sampled: bool) -> str:
        """Differs for files of other content.

        Args:
          sampled: of a file of this machine that has more than 1 MiB, 256 blocks of 4 KiB are read.
        """

    def sha256(self) -> str:
        """The hash of its bytes, in hexadecimal."""
        with self.open() as content:
            return hashlib.file_digest(cast(Any, content), "sha256").hexdigest()


class _Gzip(gzip.GzipFile):
    """A compressed file that closes what it reads from."""

    def __init__(self, content: IO[bytes]):
        super().__init__(fileobj=content, mode="rb")
        self._content = content

    def close(self) -> None:
        super().close()
        self._content.close()


@dataclass(frozen=True)
class LocalFile(AbstractDataFile):
    """A file of this machine."""

    path: Path

    @property
    def size(self) -> int:
        return size_of(self.path)

    def open(self) -> IO[bytes]:
        return open_file(self.path)

    def identity(self, *, sampled: bool) -> str:
        return identity(self.path, **_SAMPLED) if sampled else identity(self.path)


@dataclass(frozen=True)
class BucketFile(AbstractDataFile):
    """An object of a bucket; its name is its address."""

    @property
    def _info(self) -> dict[str, Any]:
        store, path = open_store(self.name)
        try:
            return store.info(path)
        except Exception as error:
            raise store_error(self.name, error) from error

    @property
    def size(self) -> int:
        return int(self._info["size"])

    def open(self) -> IO[bytes]:
        store, path = open_store(self.name)
        try:
            content = store.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")
            return io.BufferedReader(content, 2**20)  # Its own `readline` takes no bound.
        except Exception as error:
            raise store_error(self.name, error) from error

    def identity(self, *, sampled: bool) -> str:
        """The hash that the store keeps of it; where it keeps none, that of its bytes."""
        info = self._info
        for name in ("md5Hash", "crc32c", "ETag", "etag"):
            if info.get(name):
                return f"{name} {info[name]} of {info['size']} bytes"
        return self.sha256()


@dataclass(frozen=True)
class HubFile(AbstractDataFile):
    """A file of a data set of the hub; it is fetched into the client's cache when it is opened."""

    repository: HubName
    """Its revision is a commit."""
    path: str
    """In the repository."""
    object_id: str
    """The hub's hash of its content."""
    bytes: int

    @property
    def size(self) -> int:
        return self.bytes

    def open(self) -> BinaryIO:
        return open_file(fetch_file(self.repository, self.path, size=self.bytes))

    def identity(self, *, sampled: bool) -> str:
        return self.object_id


def check_data_path(path: str, name: str) -> None:
    """Raises ValueError for an address that data are not read from; asks no server."""
    scheme = scheme_of(path)
    if scheme == HUB:
        check_hub_name(path, name)
    elif scheme is not None and not path.startswith(PACKAGED):
        check_store(path, name)


def data_files(path: str | Path) -> list[AbstractDataFile]:
    """The files of a source of text, in sorted order.

    Of a folder, all files of text to the bottom; of a folder that `datasets.Dataset.save_to_disk`
    wrote, those that its `state.json` names. One logged line says what else the folder holds.

    Args:
      path: a file, a folder or a pattern of this machine (`package:sample/train.jsonl` is a file
        of this package); the address of an object, of a folder or of a pattern
        (`s3://bucket/text/*.parquet`); or `hf://datasets/OWNER/NAME[@REVISION][/PATTERN]`.

    Raises:
      FileNotFoundError: there is no such file, folder or data set.
      ValueError: it holds no text of a kind that is read, a hidden one, a text in two forms, or
        several splits of a data set.
      OSError: the hub cannot be reached.
    """
    scheme = scheme_of(path)
    if scheme == HUB:
        return _hub_files(str(path))
    if scheme is None or str(path).startswith(PACKAGED):
        return _local_files(str(path))
    return _bucket_files(str(path))


def _local_files(name: str) -> list[AbstractDataFile]:
    path = Path(name)
    if name.startswith(PACKAGED):
        path = Path(__file__).parent.parent / name.removeprefix(PACKAGED)
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        return chosen({"": LocalFile(str(path), path)}, str(path))
    root = Path(fixed_part(str(path)))
    found = [str(x) for x in root.rglob("*") if x.is_file() and is_named(str(x), str(path))]
    if not found and not path.exists():
        prepared = path.suffix == ".bin"
        way_out = (
            ", or write it: docs/howto/data.md has the commands for the paper's files (`python -m "
            "fwpkm_jax.data.prepare`) and for ids of your own"
        )
        raise FileNotFoundError(
            f"There is no file or folder {path.absolute()}; check the path{way_out * prepared}."
        )
    return chosen({below(x, str(root)): LocalFile(x, Path(x)) for x in found}, str(path))


def _bucket_files(address: str) -> list[AbstractDataFile]:
    store, path = open_store(address)
    root = fixed_part(path)
    try:
        found = [x for x in store.find(root) if is_named(x, path)]
    except Exception as error:
        raise store_error(address, error) from error
    if not found:
        raise FileNotFoundError(f"There is no object or folder {address}; check the address.")
    files = {below(x, root): BucketFile(store.unstrip_protocol(x)) for x in found}
    return chosen(files, address)


def _hub_files(address: str) -> list[AbstractDataFile]:
    _, part = check_hub_name(address)
    repository, entries = list_files(address)
    root = fixed_part(part)
    files = {
        below(x.path, root): HubFile(
            f"{repository}/{x.path}",
            repository,
            x.path,
            x.lfs.sha256 if x.lfs else x.blob_id,
            x.size,
        )
        for x in entries
        if is_named(x.path, part)
    }
    where = f"{repository}/{part}".rstrip("/")
    if not files:
        there = some(sorted(x.path for x in entries)) or "none"
        raise ValueError(f"{where} is no file of the data set, only {there}; name another.")
    return chosen(files, where)


def source_identities(files: Sequence[AbstractDataFile]) -> list[list[str]]:
    """Name and hash of each file, in order, as JSON values.

    A source of more than `MOST_NAMED` files has one entry, for all of them.
    Files of this machine are hashed whole if together they have at most `identity.WHOLE` bytes.
    """
    local = sum(file.size for file in files if isinstance(file, LocalFile))
    found = [[file.short_name, file.identity(sampled=local > WHOLE)] for file in files]
    if len(found) <= MOST_NAMED:
        return found
    joined = hashlib.sha256("\n".join(digest for _, digest in found).encode()).hexdigest()
    return [[f"{len(found)} files from {files[0].name.rpartition('/')[0]}", joined]]
