"""Files and folders that are whole or absent, and never written through a link."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from fwpkm_jax.io.atomic import (
    check_local,
    is_unfinished,
    new_folder,
    open_own,
    own_folder,
    remove_unfinished,
    replacing,
    write_json,
    write_text,
)
from fwpkm_jax.io.safetensors import write_tensors
from fwpkm_jax.io.untrusted import read_json


def test_a_value_comes_back_and_nothing_else_is_left(tmp_path):
    write_json(tmp_path / "a.json", {"name": "Gödel", "numbers": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"name": "Gödel", "numbers": [1, 2.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_value_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        write_json(path, 2)
    assert read_json(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed_and_only_that(tmp_path):
    path = tmp_path / "a[1].json"
    endings = ("0" * 16, "1" * 16, "2" * 16, "x")
    old, link, named, mine = (tmp_path / f".a[1].json.{x}.tmp" for x in endings)
    target, second = tmp_path / "target", tmp_path / "second"
    for file in (path, old, named, mine, target):
        file.write_text("left")
    link.symlink_to(target)
    second.hardlink_to(named)
    assert is_unfinished(old, path)
    assert not is_unfinished(mine, path)
    remove_unfinished(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, link, named, mine, target, second])
    assert target.read_text() == "left"


def test_the_name_is_replaced_and_not_what_a_link_of_that_name_leads_to(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "a.json").symlink_to(target)
    # The names that earlier versions wrote to.
    (tmp_path / "a.json.tmp").symlink_to(target)
    write_json(tmp_path / "a.json", 4)
    assert read_json(tmp_path / "a.json") == 4
    assert target.read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_permissions_are_those_of_any_new_file(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("kind", ["link", "dangling", "second name", "folder", "pipe"])
def test_a_file_that_stays_in_its_place_is_opened_only_if_it_is_plain(tmp_path, kind):
    target, path = tmp_path / "precious", tmp_path / "lock"
    if kind != "dangling":
        target.write_text("mine")
    if kind in ("link", "dangling"):
        path.symlink_to(target)
    elif kind == "second name":
        path.hardlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ValueError, match=r"lock is .*; remove it and try again"):
        open_own(path, os.O_RDWR | os.O_CREAT)
    assert kind == "dangling" or target.read_text() == "mine"
    assert target.exists() == (kind != "dangling")


def test_a_folder_that_has_the_name_of_a_file_is_named(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        write_json(tmp_path / "a.json", 4)
    assert raised.value.filename == str(tmp_path / "a.json")
    assert [x.name for x in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_of_a_run_is_no_link(tmp_path):
    assert own_folder(tmp_path / "a") == own_folder(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=r"b is a link; a run writes inside its own folder only"):
        own_folder(tmp_path / "b")
    (tmp_path / "c").write_text("")
    with pytest.raises(ValueError, match=r"c is a file"):
        own_folder(tmp_path / "c")


def test_a_new_folder_is_whole_or_absent_and_takes_no_name_that_is_used(tmp_path):
    with new_folder(tmp_path / "deep" / "a") as new:
        (new / "x").write_text("1")
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a" / "x").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "b") as new:
        _fill(new / "x", RuntimeError())
    mine = tmp_path / "c.partial"
    mine.mkdir()
    (mine / "x").write_text("mine")
    with new_folder(tmp_path / "c"):
        pass
    assert (mine / "x").read_text() == "mine"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["c", "c.partial", "deep"]
    with pytest.raises(FileExistsError, match="c exists"), new_folder(tmp_path / "c"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="link exists"), new_folder(tmp_path / "link"):
        pass
    for may_be_empty in (False, True):  # Two at once: the second does not replace the first.
        with (
            pytest.raises(FileExistsError, match="d exists"),
            new_folder(tmp_path / "d", may_be_empty=may_be_empty),
        ):
            _fill(tmp_path / "d" / "other")
        assert [x.name for x in (tmp_path / "d").iterdir()] == ["other"]
        (tmp_path / "d" / "other").unlink()
        (tmp_path / "d").rmdir()
    with new_folder(tmp_path / "link2", may_be_empty=True):
        (tmp_path / "link2").mkdir()
    assert not [x for x in tmp_path.iterdir() if "partial-" in x.name]


def _fill(path, error=None):
    path.parent.mkdir(exist_ok=True)
    path.write_text("first")
    if error is not None:
        raise error


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3://b/r", "memory://x", "file:///tmp/x"])
def test_an_address_is_no_path(tmp_path, monkeypatch, address):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run_dir='.*' is an address.*mount the bucket"):
        check_local(address, "run_dir")
    with pytest.raises(ValueError, match="is an address"):
        write_text(Path(address), "x")
    with pytest.raises(ValueError, match="is an address"), new_folder(address):
        pass
    assert not list(tmp_path.iterdir())
    for path in ("runs/a", "/tmp/x", "a:b", "./gs:/x", "C:/x"):
        check_local(path, "run_dir")


def test_tensors_are_read_back_by_the_library(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = ["float64", "float32", "float16", "int64", "int8", "uint32", "uint16", "bool"]
    arrays = {f"{n}/ä": (rng.normal(size=(2, 3)) * 9).astype(n) for n in dtypes}
    arrays |= {"scalar": np.float32(3.5)[None][0:1].reshape(()), "empty": np.zeros((0, 4))}
    arrays["turned"] = np.arange(6, dtype=np.int32).reshape(2, 3).T
    arrays["bf16"] = np.asarray([1.5, -2], ml_dtypes.bfloat16)
    with replacing(tmp_path / "x") as file:
        write_tensors(file, arrays, metadata={"a": "ü"})
    with safe_open(tmp_path / "x", framework="numpy") as file:
        assert file.metadata() == {"a": "ü"}
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(found[name], x)
    with pytest.raises(ValueError, match="a is complex64"), replacing(tmp_path / "y") as file:
        write_tensors(file, {"a": np.zeros(2, np.complex64)}, metadata={})
    assert not (tmp_path / "y").exists()
