"""Files that are whole or absent."""

import os

import pytest

from fwpkm_jax.outside_files import read_json
from fwpkm_jax.whole_files import unfinished, write_json


def test_a_value_comes_back_and_nothing_else_is_left(tmp_path):
    write_json(tmp_path / "a.json", {"name": "Gödel", "numbers": [1, 2.5, None]})
    assert read_json(tmp_path / "a.json") == {"name": "Gödel", "numbers": [1, 2.5, None]}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_value(tmp_path, monkeypatch):
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
    assert unfinished(path).exists()  # What a killed process would leave, too.
