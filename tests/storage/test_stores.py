"""Objects of a bucket: written whole, on conditions, and read again where an answer was lost."""

import threading

import pytest

from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.storage import stores
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.stores import Store
from tests.training.runs.stores import a_store

# gcsfs gives the client of HTTP a large body as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(
    params=[
        "memory",
        *(
            pytest.param(kind, marks=(pytest.mark.thorough, pytest.mark.extras))
            for kind in ("s3", "gs")
        ),
    ]
)
def address(request, monkeypatch):
    with a_store(request.param, monkeypatch) as address:
        yield address


@pytest.mark.slow_cases("gs")
def test_objects_are_read_written_listed_and_removed(address, tmp_path):
    store = Store(address)
    assert store.sizes() == {}
    store.write("a/b c.txt", b"one")
    (tmp_path / "x").write_bytes(b"x" * 6_000_000)
    store.upload(tmp_path / "x", "big")
    assert store.sizes() == {"a/b c.txt": 3, "big": 6_000_000}
    assert store.read("a/b c.txt") == b"one"
    store.download("big", tmp_path / "y")
    assert (tmp_path / "y").read_bytes() == b"x" * 6_000_000
    store.remove("big")
    store.remove("big")
    assert list(store.sizes()) == ["a/b c.txt"]
    with pytest.raises(FileNotFoundError, match=rf"There is no {address}/none"):
        store.read("none")


@pytest.mark.slow_cases("gs")
def test_an_object_of_more_bytes_than_its_store_states_is_not_taken(address, tmp_path, monkeypatch):
    store, whole = Store(address), Store._info
    store.write("x", bytes(30_000_000))
    assert len(store.read("x", most=30_000_000)) == 30_000_000
    with pytest.raises(OutsideFileError, match="/x has 30,000,000 bytes, and at most 8,388,608"):
        store.read("x")
    monkeypatch.setattr(Store, "_info", lambda self, name: {**whole(self, name), "size": 10})
    with pytest.raises(StoreError, match="of 10 bytes came"):
        store.download("x", tmp_path / "x")
    # A client of gs:// removes what it has of a file.
    assert sum(file.stat().st_size for file in tmp_path.glob("x")) < 30_000_000


def test_an_object_appears_when_its_upload_is_complete(monkeypatch, tmp_path):
    (tmp_path / "x").write_bytes(bytes(100_000_000))
    with a_store("memory", monkeypatch) as address:
        store, seen = Store(address), set()
        upload = threading.Thread(target=store.upload, args=(tmp_path / "x", "x"))
        upload.start()
        while upload.is_alive():
            seen |= set(store.sizes().values())
        upload.join()
        assert seen <= {100_000_000}


@pytest.mark.slow_cases("gs")
def test_conditional_writes_hold(address):
    store = Store(address)
    assert store.versioned("x") is None
    assert store.create("x", b"one")
    assert not store.create("x", b"two")
    content, version = store.versioned("x")
    assert content == b"one"
    assert store.replace("x", b"three", version)
    assert not store.replace("x", b"four", version)
    assert store.read("x") == b"three"
    store.remove("x")
    assert not store.replace("x", b"five", version)
    assert store.sizes() == {}


@pytest.mark.thorough("memory")
def test_of_many_that_create_at_once_one_does(address):
    won, start = [], threading.Barrier(8)

    def create(number):
        start.wait()
        if Store(address).create("lock", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert Store(address).read("lock") == b"%d" % won[0]


@pytest.mark.extras
@pytest.mark.parametrize("address", ["s3://bucket", "gs://bucket/"])
def test_a_bucket_alone_is_refused(address):
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs"}[address[:2]])
    with pytest.raises(ValueError, match="names a bucket and no folder in it"):
        Store(address)


def test_names_that_lead_out_of_the_folder_are_refused():
    for name in ("../x", "/x", "a/../../x", "a\\b", "a//b", "./a"):
        with pytest.raises(OutsideFileError, match="which is no path in a folder"):
            stores.checked_name(name, "gs://b/r")
