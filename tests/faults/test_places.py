"""Every place of a received folder where a file is opened, with something odd in it.

`places.py` finds the places by tracing, so that a new one is tried by itself.
"""

from pathlib import Path

import pytest

from tests.faults.places import ODD, Case, Place, cases, make_odd, outcomes, tried

CHEAP = ("link", "pipe", "device", "folder")
"""3 GB of zeros take seconds to be read by a hash."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "odd"),
    [
        pytest.param("small", CHEAP, marks=pytest.mark.thorough),
        pytest.param("small", ("zeros",), marks=pytest.mark.slow),
        pytest.param("whole", ODD, marks=pytest.mark.slow),
        pytest.param("remote", ("device", "folder", "zeros"), marks=pytest.mark.slow),
    ],
)
def test_an_odd_thing_in_a_place_is_refused_in_a_line_or_does_no_harm(fault, name, odd):
    found = list(outcomes(name, only=odd))
    with fault("a link, pipe, device, folder or 3 GB where others wrote", len(found)):
        assert len(found) > 15 * len(odd)
        assert not [(case, outcome) for case, outcome in found if not outcome.right]
    refused = {case.odd for case, outcome in found if outcome.kind == "refused"}
    assert refused == {*odd}


def test_a_place_is_found_where_it_is_opened(tmp_path):
    good, work = tmp_path / "good", tmp_path / "work"
    (good / "run").mkdir(parents=True)
    (good / "run" / "a.json").write_text("{}")

    def command(folder: Path) -> None:
        from fwpkm_jax.io.untrusted import read_json

        read_json(folder / "run" / "a.json")

    place = Place("run/a.json", "a library's thread")  # No module of the package but the door.
    assert cases({"read": command}, good, work) == [Case("read", place, odd) for odd in ODD]


@pytest.mark.parametrize(
    ("odd", "kind"), [("link", "leaks"), ("zeros", "memory"), ("pipe", "hangs"), ("folder", "done")]
)
def test_what_may_not_be_is_seen(tmp_path, monkeypatch, odd, kind):
    good, work = tmp_path / "good", tmp_path / "work"
    (good / "run").mkdir(parents=True)
    (good / "run" / "note").write_text("note")
    monkeypatch.setattr("tests.faults.places._WALL", 1 if odd == "pipe" else 60)
    monkeypatch.setattr("tests.faults.places.MEMORY_MIB", 20)

    def command(folder: Path) -> int:
        path = folder / "run" / "note"
        if path.is_dir():
            return 0
        with path.open("rb") as file:
            (folder / "out").write_bytes(file.read(2**26))
        return 0

    case = Case("copy", Place("run/note", "here"), odd)
    assert tried(command, case, good, work).kind == kind


def test_a_traceback_and_a_changed_file_outside_are_seen(tmp_path):
    good, work = tmp_path / "good", tmp_path / "work"
    (good / "run").mkdir(parents=True)
    (good / "run" / "note").write_text("note")

    def fails(folder: Path) -> None:
        raise KeyError(folder)

    def writes(folder: Path) -> int:
        (folder / "run" / "note").write_text("new")
        return 0

    case = Case("command", Place("run/note", "here"), "link")
    assert tried(fails, case, good, work).kind == "traceback"
    assert tried(writes, case, good, work)[:2] == ("leaks", "changed what lies outside")


def test_a_folder_can_be_made_odd(tmp_path):
    place = tmp_path / "run" / "hf"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    make_odd(place, "link", tmp_path)
    assert place.is_symlink()
    assert (place / "config.json").read_text() == "{}"
