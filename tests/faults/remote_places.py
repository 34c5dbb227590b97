"""Places of a bucket and of a hub: what they send is a file or folder below `bucket` or `hub`.

A device in such a place is an object that has no end and is said to have ten bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from tests import loopback

SAID = 10
"""Bytes that an object without an end is said to have."""
COMMIT = "c" * 40
MODEL, TEXTS = "somebody/model", "somebody/texts"


def said_size(path: str | Path) -> int:
    """Bytes that a store states of an object."""
    return os.path.getsize(path) if os.path.isfile(path) else SAID


class _Object(AbstractBufferedFile):
    """An object that is read by ranges of the bytes that it is said to have."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(end - start)


class Bucket(LocalFileSystem):
    """A store whose objects are files: `memory:///a/b` is `/a/b` of this machine."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Object(self, path, mode) if mode == "rb" else super()._open(path, mode, **options)

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: object) -> bytes:
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def get_file(self, rpath: str, lpath: str, callback: Callback, **_: object) -> None:
        with open(rpath, "rb") as source, open(lpath, "wb") as file:
            for some in iter(functools.partial(source.read, 2**20), b""):
                callback.relative_update(file.write(some))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("memory:/", "", 1))

    def unstrip_protocol(self, name: str) -> str:
        return f"memory://{name}"

    def info(self, path: Any, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        if found["type"] != "directory":
            found |= {
                "type": "file",
                "size": said_size(found["name"]),
                "crc32c": str(found["mtime"]),
            }
        return found


class Hub(loopback.Handler):
    """Answers with the files of a folder, whatever they hold."""

    folder: Path

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", _, owner, name, *rest]:
                file = self.folder / owner / name / ("tree" if "tree" in rest else "info")
            case [*repository, "resolve", _, name]:
                file = self.folder.joinpath(*repository[-2:], "files", name)
            case _:
                file = self.folder / "none"
        if not file.exists() or file.is_dir():
            self._answer(404, b"{}", X_Error_Code="EntryNotFound")
            return
        endless = self.command == "GET" and not file.is_file()
        length = {"Transfer_Encoding": "chunked"} if endless else {}
        self.send_response(200)
        for header, value in {
            "ETag": f'"{hashlib.sha256(file.name.encode()).hexdigest()}"',
            "X_Repo_Commit": COMMIT,
            **(length or {"Content_Length": str(said_size(file))}),
        }.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.close_connection = True
        try:
            with file.open("rb") as content:
                for some in iter(functools.partial(content.read, 2**16), b""):
                    self.wfile.write(b"10000\r\n" + some + b"\r\n" if endless else some)
        except OSError:
            pass  # The client has gone.

    do_HEAD = do_GET


def connect(work: Path) -> None:
    """From now on `memory://` and the hub's client of this process ask these folders."""
    from huggingface_hub import constants

    from fwpkm_jax.storage import addresses

    addresses._file_system = lambda scheme: Bucket(auto_mkdir=True, use_listings_cache=False)
    addresses.FIRST_WAIT = 0.0
    served = type("Served", (Hub,), {"folder": work / "hub"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    Thread(target=server.serve_forever, daemon=True).start()
    constants.ENDPOINT = f"http://127.0.0.1:{server.server_port}"
    constants.HUGGINGFACE_CO_URL_TEMPLATE = (
        constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    constants.HF_HUB_CACHE = str(work / "cache")
    constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_PROGRESS_BARS = True
    constants.HF_TOKEN_PATH = str(work / "token")


def fill(folder: Path) -> None:
    """Moves the folder's model into a bucket and to a hub, and texts."""
    bucket, hub = folder / "bucket", folder / "hub"
    shutil.copytree(folder / "model", bucket / "model")
    shutil.copytree(folder / "model", hub / MODEL / "files")
    for texts in (bucket / "texts", hub / TEXTS / "files"):
        texts.mkdir(parents=True)
        (texts / "a.jsonl").write_text('{"text": "the cat sat"}\n' * 20)
    for repository in (hub / MODEL, hub / TEXTS):
        tree = [_entry(file) for file in sorted((repository / "files").iterdir())]
        (repository / "tree").write_text(json.dumps(tree))
        (repository / "info").write_text(json.dumps({"id": "x", "sha": COMMIT, "siblings": []}))
    for name in ("model", "weights"):
        shutil.rmtree(folder / name)


def _entry(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    entry = {"type": "file", "path": file.name, "size": len(content), "oid": "0" * 40}
    if file.suffix == ".safetensors":
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry
