"""Google Cloud Storage on this machine: what gcsfs asks of it here, with generations, no more."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

from tests import loopback


class SmallGCS:
    """Objects by bucket and name, each with its generation.

    Attributes:
      url: of the server.
      objects: content and generation by (bucket, name).
      ignores_conditions: writes without a look at `ifGenerationMatch`, as some emulators do.
    """

    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.ignores_conditions = False
        self.lock = threading.Lock()
        self.uploads: dict[str, tuple[str, str, bytes]] = {}
        self.generation = 1000

    def put(self, bucket: str, name: str, content: bytes, condition: str | None) -> dict | None:
        """Writes an object; None where the condition does not hold."""
        with self.lock:
            now = self.objects.get((bucket, name), (b"", 0))[1]
            if condition not in (None, str(now)) and not self.ignores_conditions:
                return None
            self.generation += 1
            self.objects[bucket, name] = content, self.generation
            return self.facts(bucket, name)

    def facts(self, bucket: str, name: str) -> dict:
        content, generation = self.objects[bucket, name]
        return {
            "kind": "storage#object", "name": name, "bucket": bucket, "size": str(len(content)),
            "generation": str(generation), "metageneration": "1", "etag": f"e{generation}",
            "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
            "timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z",
        }  # fmt: skip


@contextmanager
def serving(small: SmallGCS) -> Iterator[None]:
    """Serves the objects on a free port of this machine."""
    with loopback.serving(_Handler, small=small) as small.url:
        yield


class _Handler(loopback.Handler):
    small: SmallGCS

    def _refuse(self, status: int) -> None:
        self._json({"error": {"code": status, "message": "refused"}}, status)

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, {name: x[0] for name, x in parse_qs(parts.query).items()}

    def do_GET(self) -> None:
        path, query = self._asked()
        if found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", path):
            return self._list(found[1], query)
        if not (found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", path)):
            return self._refuse(404)
        key = found[1], unquote(found[2])
        with self.small.lock:
            if key not in self.small.objects:
                return self._refuse(404)
            content, facts = self.small.objects[key][0], self.small.facts(*key)
        if query.get("alt") != "media":
            return self._json(facts)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._answer(200, content)
        start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
        if start >= len(content):
            return self._refuse(416)
        part = content[start:stop]
        end = start + len(part) - 1
        self._answer(206, part, Content_Range=f"bytes {start}-{end}/{len(content)}")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, cut = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], set()
        with self.small.lock:
            for owner, name in sorted(self.small.objects):
                if owner != bucket or not name.startswith(prefix):
                    continue
                rest = name[len(prefix) :]
                if cut and cut in rest:
                    prefixes.add(prefix + rest.split(cut)[0] + cut)
                else:
                    items.append(self.small.facts(owner, name))
        self._json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def do_POST(self) -> None:
        path, query = self._asked()
        if path == "/resume":
            return self.do_PUT()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o/?", path)
        if found is None:
            return self._refuse(404)
        name = query.get("name", "")
        if query["uploadType"] == "multipart":
            kind = self.headers["Content-Type"]
            mark = re.search(r'boundary="?([^";]+)', kind)[1].encode()
            _, meta, media, _ = body.split(b"--" + mark)
            name = json.loads(meta.split(b"\n\n", 1)[1])["name"]
            body = media.split(b"\n\n", 1)[1].removesuffix(b"\n")
        elif query["uploadType"] == "resumable":
            name = name or json.loads(body)["name"]
            number = str(len(self.small.uploads))
            self.small.uploads[number] = found[1], name, b""
            return self._answer(200, Location=f"{self.small.url}/resume?upload_id={number}")
        facts = self.small.put(found[1], name, body, query.get("ifGenerationMatch"))
        return self._refuse(412) if facts is None else self._json(facts)

    def do_PUT(self) -> None:
        _, query = self._asked()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        bucket, name, before = self.small.uploads[query["upload_id"]]
        content = before + body
        self.small.uploads[query["upload_id"]] = bucket, name, content
        whole = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", self.headers["Content-Range"])
        if whole is None:
            return self._answer(308, Range=f"bytes=0-{len(content) - 1}")
        facts = self.small.put(bucket, name, content, None)
        self._json(facts)

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        found = re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)", path)
        with self.small.lock:
            gone = found and self.small.objects.pop((found[1], unquote(found[2])), None)
        return self._answer(204) if gone else self._refuse(404)
