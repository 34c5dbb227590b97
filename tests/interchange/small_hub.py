"""A hub on this machine: what the client asks for fetching and pushing, and no more."""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import loopback

TOKEN = "hf_ofTheTests"


class SmallHub:
    """Repositories by name, each with its commits; files by path in each commit.

    Attributes:
      url: of the hub.
      repositories: for each name the commits, oldest first, as pairs of hash and files; the name
        of a data set is `datasets/owner/name`.
      private, gated: names that want a login.
      asked: lines "GET /path" in order.
      cuts: of how many downloads of weights the connection is lost halfway.
      lies: what answers say in place of the truth: "sha" of a model, "path" of one more file,
        "etag" and "commit" in the headers of files, "body" of the weights; "large" is a file of
        which the list states 3 GB, "endless" one, or "tree" or "revision", that has no end.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.cuts = 0
        self.lies: dict[str, str] = {}

    def commit(self, name: str, files: dict[str, bytes]) -> str:
        """Adds a commit with exactly these files; returns its hash."""
        commits = self.repositories.setdefault(name, [])
        commits.append((hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest(), dict(files)))
        return commits[-1][0]

    def add_folder(self, name: str, folder: Path) -> str:
        return self.commit(name, {x.name: x.read_bytes() for x in folder.iterdir() if x.is_file()})

    def files(self, name: str) -> dict[str, bytes]:
        return self.repositories[name][-1][1]


@contextmanager
def serving(hub: SmallHub) -> Iterator[None]:
    """Serves the hub on a free port of this machine."""
    with loopback.serving(_Handler, hub=hub) as hub.url:
        yield


@contextmanager
def a_small_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A hub that the client asks, with an empty cache in the folder; nobody is logged in."""
    from huggingface_hub import constants

    small = SmallHub()
    with serving(small):
        template = small.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": small.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(folder / "cache"),
            "HF_TOKEN_PATH": str(folder / "token"),
            "HF_HUB_DISABLE_XET": True,
            "DOWNLOAD_CHUNK_SIZE": 64,
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield small


class _Handler(loopback.Handler):
    hub: SmallHub

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def _repository(self, name: str) -> list[tuple[str, dict[str, bytes]]] | None:
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name not in self.hub.repositories or (name in self.hub.private and not known):
            return self._refuse(401, "RepoNotFound")
        if name in self.hub.gated and not known:
            return self._refuse(403, "GatedRepo")
        return self.hub.repositories[name]

    def _commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self._repository(name)
        if commits is None:
            return None
        if revision == "main":
            return commits[-1]
        for commit in commits:
            if commit[0] == revision:
                return commit
        return self._refuse(404, "RevisionNotFound")

    def do_GET(self) -> None:
        parts = [unquote(x) for x in urlsplit(self.path).path.strip("/").split("/")]
        self.hub.asked.append(f"{self.command} {urlsplit(self.path).path}")
        if self.command == "GET" and self.hub.lies.get("endless") in parts:
            return self._endless()
        match parts:
            case ["api", "whoami-v2"]:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self._refuse(401, "")
                return self._json({"name": "me", "type": "user"})
            case ["api", "models", owner, name, "revision", revision]:
                found = self._commit(f"{owner}/{name}", revision)
                if found is not None:
                    sha = self.hub.lies.get("sha", found[0])
                    self._json({"id": f"{owner}/{name}", "sha": sha, "siblings": []})
            case ["api", "datasets", owner, name, *rest] if rest[:1] in ([], ["revision"]):
                found = self._commit(f"datasets/{owner}/{name}", (*rest, "main")[1 if rest else 0])
                if found is not None:
                    self._json({"id": f"{owner}/{name}", "sha": found[0], "siblings": []})
            case ["api", "datasets", owner, name, "tree", revision, *_]:
                found = self._commit(f"datasets/{owner}/{name}", revision)
                if found is not None:
                    self._json([_entry(path, x) for path, x in found[1].items()])
            case ["datasets", owner, name, "resolve", revision, *path]:
                found = self._commit(f"datasets/{owner}/{name}", revision)
                if found is not None:
                    self._file(*found, "/".join(path))
            case ["api", "models", owner, name, "tree", revision, *_]:
                found = self._commit(f"{owner}/{name}", revision)
                if found is not None:
                    more = [(self.hub.lies["path"], b"")] if "path" in self.hub.lies else []
                    entries = [_entry(path, x) for path, x in [*found[1].items(), *more]]
                    for entry in entries:
                        if entry["path"] == self.hub.lies.get("large"):
                            entry["size"] = 3 * 2**30
                    self._json(entries)
            case [owner, name, "resolve", revision, *path]:
                found = self._commit(f"{owner}/{name}", revision)
                if found is not None:
                    self._file(*found, "/".join(path))
            case _:
                self._refuse(404, "")

    do_HEAD = do_GET

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):  # The client goes.
            while True:
                self.wfile.write(b"100000\r\n" + bytes(2**20) + b"\r\n")

    def _file(self, commit: str, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        body, begin = files[path], 0
        if (asked := self.headers.get("Range", "")).startswith("bytes="):
            begin = int(asked.removeprefix("bytes=").split("-")[0])
        etag = self.hub.lies.get("etag", hashlib.sha256(body).hexdigest())
        headers = {"X_Repo_Commit": self.hub.lies.get("commit", commit), "ETag": f'"{etag}"'}
        if path.endswith(".safetensors") and "body" in self.hub.lies:
            body = body[:-1] + self.hub.lies["body"].encode()
        whole = body
        body = body[begin:]
        headers["Content_Length"] = str(len(body))
        if begin:
            headers["Content_Range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
            self.hub.asked.append(f"from byte {begin}")
        if self.command == "GET" and path.endswith((".safetensors", ".parquet")) and self.hub.cuts:
            self.hub.cuts -= 1
            self._answer(206 if begin else 200, body[: len(body) // 2], **headers)
            self.close_connection = True
            return
        self._answer(206 if begin else 200, body, **headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "")
        parts = [unquote(x) for x in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization', 'me')}/{asked['name']}"
                if name in self.hub.repositories:
                    return self._json({"url": f"{self.hub.url}/{name}"}, 409)
                self.hub.commit(name, {})
                if asked.get("private") or asked.get("visibility") == "private":
                    self.hub.private.add(name)
                self._json({"url": f"{self.hub.url}/{name}", "name": name})
            case ["api", "validate-yaml"]:
                self._json({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", _]:
                files = [x["path"] for x in json.loads(body)["files"]]
                modes = [("lfs" if x.endswith(".safetensors") else "regular") for x in files]
                found = [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False}
                    for path, mode in zip(files, modes, strict=True)
                ]
                self._json({"files": found})
            case [_, _, "info", "lfs", "objects", "batch"]:
                objects = [
                    {**x, "actions": {"upload": {"href": f"{self.hub.url}/large/{x['oid']}"}}}
                    for x in json.loads(body)["objects"]
                ]
                self._json({"transfer": "basic", "objects": objects})
            case ["api", "models", owner, name, "commit", _]:
                self._push(f"{owner}/{name}", [json.loads(line) for line in body.splitlines()])
            case _:
                self._refuse(404, "")

    def do_PUT(self) -> None:
        body = self._body()
        assert hashlib.sha256(body).hexdigest() == self.path.rsplit("/", 1)[1]
        self.hub.large[self.path.rsplit("/", 1)[1]] = body
        self._answer(200)

    def _push(self, name: str, lines: list[dict]) -> None:
        files = dict(self.hub.files(name))
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        commit = self.hub.commit(name, files)
        url = f"{self.hub.url}/{name}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})


def _entry(path: str, body: bytes) -> dict:
    oid = hashlib.sha1(body).hexdigest()
    entry = {"type": "file", "path": path, "size": len(body), "oid": oid}
    if path.endswith((".safetensors", ".parquet")):
        entry["lfs"] = {
            "oid": hashlib.sha256(body).hexdigest(),
            "size": len(body),
            "pointerSize": 130,
        }
    return entry
