"""Folders and buckets that are made equal: what is whole counts, what is damaged stays."""

import json

import pytest

from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.storage.addresses import StoreError
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.storage.sync import FolderCopy, Versions, fetched
from tests.training.runs.stores import a_store


@pytest.fixture
def store(monkeypatch):
    with a_store("memory", monkeypatch) as address:
        yield Store(address)


def no_check():
    """Nothing is locked here."""


def write(store, tmp_path, number, content=b"content"):
    """A version of two files, and its names in the store."""
    before = set(store.sizes())
    place = tmp_path / f"made-{number}-{len(before)}"
    (place / "d").mkdir(parents=True)
    (place / "a").write_bytes(content)
    (place / "d" / "b").write_bytes(content * 2)
    versions = look(store)
    versions.write(number, place, no_check)
    return {name for name in store.sizes() if name.startswith(f"x/{number}-")} - before


def look(store):
    versions = Versions(store, "x")
    versions.look(store.sizes())
    return versions


def content_of(versions, number, tmp_path):
    place = tmp_path / "fetched" / str(number)
    if not versions.fetch(number, place):
        return None
    return {
        x.relative_to(place).as_posix(): x.read_bytes() for x in place.rglob("*") if x.is_file()
    }


def test_a_version_comes_back_as_it_was_and_goes_as_a_whole(store, tmp_path):
    write(store, tmp_path, 3)
    versions = look(store)
    assert versions.whole == {3}
    assert content_of(versions, 3, tmp_path) == {"a": b"content", "d/b": b"contentcontent"}
    versions.remove(3, no_check)
    assert store.sizes() == {}
    assert look(store).whole == set()


def test_what_no_marker_names_is_removed_and_nothing_else(store, tmp_path):
    write(store, tmp_path, 3)
    store.write("x/4-0123456789abcdef/a", b"left by a killed upload")
    for name in ("x/notes.txt", "x/4-notes/a", "y/4-0123456789abcdef/a"):
        store.write(name, b"a user's")
    before = set(store.sizes())
    versions = look(store)
    versions.remove_unfinished(store.sizes(), no_check)
    assert before - set(store.sizes()) == {"x/4-0123456789abcdef/a"}


@pytest.mark.parametrize("damage", ["bit", "empty", "other JSON"])
def test_the_files_of_a_damaged_marker_stay_also_after_its_number_is_written_again(
    store, tmp_path, damage
):
    names = write(store, tmp_path, 3, b"old")
    marker = store.read("x/3.json")
    damaged = {"bit": b"|" + marker[1:], "empty": b"", "other JSON": b"[1]"}[damage]
    store.write("x/3.json", damaged)
    for _ in range(2):
        versions = look(store)
        assert versions.whole == set()
        assert list(versions.damaged) == [3]
        versions.remove_unfinished(store.sizes(), no_check)
        assert names <= set(store.sizes())
    write(store, tmp_path, 3, b"new")
    versions = look(store)
    versions.remove_unfinished(store.sizes(), no_check)
    assert content_of(versions, 3, tmp_path) == {"a": b"new", "d/b": b"newnew"}
    assert names <= set(store.sizes())
    (aside,) = (name for name in store.sizes() if name.startswith("damaged_x/3-"))
    assert store.read(aside) == damaged


@pytest.mark.parametrize("damage", ["bit", "shorter", "gone"])
def test_a_file_that_is_not_what_was_saved_makes_its_version_damaged(store, tmp_path, damage):
    names = write(store, tmp_path, 3)
    (name,) = (name for name in names if name.endswith("/a"))
    if damage == "gone":
        store.remove(name)
    else:
        store.write(name, b"contemt" if damage == "bit" else b"conten")
    versions = look(store)
    assert content_of(versions, 3, tmp_path) is None
    assert versions.whole == set()
    assert name in versions.damaged[3]
    assert not list((tmp_path / "fetched").iterdir())
    versions.remove_unfinished(store.sizes(), no_check)
    assert names - {name} <= set(store.sizes())


def test_a_file_of_another_size_than_the_marker_names_is_not_downloaded(
    store, tmp_path, monkeypatch
):
    (name,) = (name for name in write(store, tmp_path, 3) if name.endswith("/a"))
    store.write(name, bytes(10**6))
    monkeypatch.setattr(store._files, "get_file", None)  # Calling it would raise.
    versions = look(store)
    assert content_of(versions, 3, tmp_path) is None
    assert f"{name} has 1,000,000 bytes, and 7 are expected" in versions.damaged[3]


def test_what_is_larger_than_its_reader_takes_is_not_downloaded(store, tmp_path, monkeypatch):
    store.write("config.json", b"{}")
    store.write("model.bin", b"x" * 100)
    store.write("hf/tokenizer.json", b"x" * 50)
    monkeypatch.setattr("fwpkm_jax.storage.sync._MOST_SMALL", 80)
    with fetched(store.address) as folder:
        assert (folder / "config.json").read_bytes() == b"{}"
        assert (folder / "model.bin").read_bytes() == bytes(100)
    monkeypatch.setattr("fwpkm_jax.storage.sync._MOST_JSON", 40)
    copy = FolderCopy(store, tmp_path / "copy")
    copy.look()
    said = "run/hf/tokenizer.json has 50 bytes, and at most 40 are expected; put it right."
    with pytest.raises(OutsideFileError, match=said):
        copy.fetch()


@pytest.mark.parametrize("request_", ["read", "download", "upload", "write", "remove"])
def test_a_store_that_fails_is_an_error_and_no_damage(store, tmp_path, monkeypatch, request_):
    write(store, tmp_path, 3)
    versions, before = look(store), store.sizes()

    def fail(*_, **__):
        raise StoreError("503")

    calls = {
        "read": lambda: look(store),
        "download": lambda: content_of(versions, 3, tmp_path),
        "upload": lambda: write(store, tmp_path, 4),
        "write": lambda: write(store, tmp_path, 4),
        "remove": lambda: versions.remove(3, no_check),
    }
    with monkeypatch.context() as patch:
        patch.setattr(Store, request_, fail)
        with pytest.raises(StoreError):
            calls[request_]()
    assert before.items() <= store.sizes().items()
    assert versions.whole == {3}
    assert content_of(versions, 3, tmp_path) is not None


def test_a_file_that_is_damaged_on_the_way_is_fetched_again(store, tmp_path, monkeypatch):
    write(store, tmp_path, 3)
    whole, seen = Store.download, set()

    def download(self, name, file, *, expected):
        whole(self, name, file, expected=expected)
        if name not in seen:
            seen.add(name)
            file.write_bytes(b"x" * file.stat().st_size)

    monkeypatch.setattr(Store, "download", download)
    assert content_of(look(store), 3, tmp_path) == {"a": b"content", "d/b": b"contentcontent"}


def test_an_upload_that_failed_goes_on_where_it_was(store, tmp_path, monkeypatch):
    place = tmp_path / "made"
    place.mkdir()
    for number in range(5):
        (place / str(number)).write_bytes(b"%d" % number)
    versions, whole, uploaded = Versions(store, "x"), Store.upload, []

    def upload(self, file, name):
        if len(uploaded) == 3 and "failed" not in uploaded:
            uploaded.append("failed")
            raise StoreError("503")
        whole(self, file, name)
        uploaded.append(name)

    monkeypatch.setattr(Store, "upload", upload)
    with pytest.raises(StoreError):
        versions.write(7, place, no_check)
    assert versions.whole == set()
    versions.write(7, place, no_check)
    assert len(uploaded) == 6
    assert len(json.loads(store.read("x/7.json"))["files"]) == 5
    assert len(store.sizes()) == 6


def test_no_write_is_made_after_the_lock_is_lost(store, tmp_path):
    def lost():
        raise ValueError("lost")

    place = tmp_path / "made"
    place.mkdir()
    (place / "a").write_bytes(b"a")
    with pytest.raises(ValueError, match="lost"):
        Versions(store, "x").write(3, place, lost)
    assert store.sizes() == {}


def test_a_copy_fetches_what_changed_and_writes_what_is_new(store, tmp_path, monkeypatch):
    store.write("a", b"1")
    store.write("d/b", b"2")
    store.write("other", b"3")
    copy = FolderCopy(store, tmp_path / "copy", holds=lambda name: name != "other")
    copy.look()
    copy.fetch()
    assert {x.name for x in (tmp_path / "copy").rglob("*") if x.is_file()} == {"a", "b"}
    assert copy.changed(["a", "d/b"]) == []
    fetched, whole = [], Store.download
    monkeypatch.setattr(
        Store, "download", lambda self, name, file: (fetched.append(name), whole(self, name, file))
    )
    store.write("a", b"11")
    copy.look()
    copy.fetch()
    assert fetched == ["a"]
    (tmp_path / "copy" / "d" / "b").write_bytes(b"22")
    assert copy.changed(["a", "d/b"]) == ["d/b"]
    copy.put("d/b")
    assert store.read("d/b") == b"22"
    assert copy.changed(["a", "d/b"]) == []
