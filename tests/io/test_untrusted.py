"""The door for files from outside: one error, one line, whatever is wrong."""

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest

from fwpkm_jax.io.atomic import check_local
from fwpkm_jax.io.untrusted import (
    OutsideFileError,
    parse_json,
    printable,
    read_bytes,
    read_json,
    read_text,
    reading,
    shown,
    without_login,
)


def test_a_message_names_file_place_and_way_out_in_one_line():
    error = OutsideFileError("a.bin", "has\n\x1b[31m9 bytes.", "tensor 'x'", "fetch it again.")
    assert str(error) == r"a.bin, tensor 'x' has \x1b[31m9 bytes; fetch it again."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ValueError)
    assert len(str(OutsideFileError("a", "x" * 10**6))) < 1000


def test_control_characters_and_length_are_kept_from_the_terminal():
    assert printable("Gödel ✓ \x1b]0;x\x07\u202e\r") == r"Gödel ✓ \x1b]0;x\x07\u202e\r"
    assert shown("a" * 400, 10) == "a" * 10 + "..."


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": ', r"a\.json is damaged \(.*\); delete it\.$"),
        (b"\xff\xfe{}", r"a\.json is not UTF-8"),
        (b"1" * 5000, r"a\.json is damaged"),
        (b"[" * 10**6, "nested too deeply"),
        (b"[" * 150 + b"]" * 150, "is nested more than 100 deep"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "is nested more than 100 deep"),
        (b"[1, 2]", r"a\.json is \[1, 2\]; a JSON object is expected; delete it"),
        (b'{"a": {"b": 1, "b": 2}}', "it names 'b' twice"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs pointer"),
        (rb'{"a": "\ud800"}', "surrogates not allowed"),
        (b'{"a": "\xed\xa0\x80"}', "can't decode byte 0xed"),
        (b" " * 101, "has 101 bytes, and at most 100 are expected"),
    ],
)
def test_json_that_cannot_be_used_is_refused_by_name(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    most = 100 if content.isspace() else 2**23
    with pytest.raises(OutsideFileError, match=said) as error:
        read_json(path, kind=dict, unique=True, most=most)
    assert "\n" not in str(error.value)


def test_json_that_can_be_used_comes_back(tmp_path):
    deep = json.loads("[" * 100 + "]" * 100)
    (tmp_path / "a.json").write_text(json.dumps(deep))
    assert read_json(tmp_path / "a.json", kind=list) == deep
    assert parse_json('{"a": 1, "a": 2}', "x") == {"a": 2}
    assert parse_json(rb'["\ud83d\ude00"]', "x") == ["\U0001f600"]
    assert parse_json(b"\xef\xbb\xbf[1]", "x") == [1]
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "is no file of bytes on a disk"),
        (tmp_path / "x\0", "is damaged"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(OutsideFileError, match=said):
            read_bytes(path, most=10)
    (tmp_path / "text").write_bytes(b"\xff")
    with pytest.raises(OutsideFileError, match="is not UTF-8"):
        read_text(tmp_path / "text", most=10)


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"[1]")
    tracemalloc.start()
    try:
        assert read_bytes(path, most=2**30) == b"[1]"
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "error", [TypeError("a"), RecursionError(), MemoryError(), ZeroDivisionError(), KeyError("k")]
)
def test_whatever_a_parser_raises_becomes_the_one_error(error):
    with (
        pytest.raises(OutsideFileError, match=r"^a\.bin, entry 3 is damaged"),
        reading("a.bin", place="entry 3"),
    ):
        raise error


@pytest.mark.parametrize(
    "address",
    [
        "https://bob:SECRET@host/x",
        "https://bob:p@SECRET@host/x",
        "HTTPS://bob:SECRET@host/x",
        "https:/bob:SECRET@host/x",  # As a `Path` has it.
        "https://host/x?token=SECRET",
    ],
)
def test_a_login_in_an_address_is_in_no_message(address):
    assert without_login(f"{address} is away").lower().replace("//", "/") == "https:/host/x is away"
    for given in (address, Path(address)):
        with pytest.raises(ValueError, match="is an address") as raised:
            check_local(given, "run_dir")
        assert "SECRET" not in str(raised.value)
