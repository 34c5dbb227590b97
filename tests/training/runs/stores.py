"""Stores that run here as servers: S3 by moto, Google Cloud Storage by `tests.small_gcs`."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from fwpkm_jax.storage import addresses
from tests.small_gcs import SmallGCS, serving

SERVED = [pytest.param(kind, marks=pytest.mark.extras) for kind in ("s3", "gs")]
KINDS = ["memory", *SERVED]


@contextmanager
def a_store(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty folder in a store of this kind; skips without its packages."""
    addresses._file_system.cache_clear()
    monkeypatch.setattr(addresses, "FIRST_WAIT", 0.0)
    if kind == "memory":
        yield "memory://bucket/run"
        store = fsspec.filesystem("memory")
        if store.exists("/bucket"):
            store.rm("/bucket", recursive=True)
    elif kind == "s3":
        pytest.importorskip("s3fs")
        server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
        server.start()
        try:
            host, port = server.get_host_and_port()
            for name, value in {
                "AWS_ENDPOINT_URL": f"http://{host}:{port}",
                "AWS_ACCESS_KEY_ID": "a",
                "AWS_SECRET_ACCESS_KEY": "b",
                "AWS_DEFAULT_REGION": "us-east-1",
            }.items():
                monkeypatch.setenv(name, value)
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            fsspec.filesystem("s3").mkdir("bucket")
            yield "s3://bucket/run"
        finally:
            reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
            urllib.request.urlopen(reset).read()
            server.stop()
            addresses._file_system.cache_clear()
    else:
        with a_small_gcs(monkeypatch):
            yield "gs://bucket/run"


@contextmanager
def a_small_gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallGCS]:
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # It asks for credentials.
    gcsfs = pytest.importorskip("gcsfs")
    small = SmallGCS()
    with serving(small):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", small.url)
        monkeypatch.setattr(gcsfs.GCSFileSystem, "_emulator_location", small.url, raising=False)
        gcsfs.GCSFileSystem.clear_instance_cache()
        addresses._file_system.cache_clear()
        yield small
    addresses._file_system.cache_clear()


def lines(steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
