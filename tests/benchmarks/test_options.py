"""The options of every program of benchmarks/: how they are read, and that each one is tried."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.options import from_json, parse, parser_of, to_json
from tests.benchmarks.tried import programs_of, unused_options, with_a_command

PROGRAMS = programs_of("benchmarks")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Says what it does."""

    folder: Path
    """Where."""
    size: Literal["tiny", "paper"] = "tiny"
    rates: tuple[float, ...] = (0.5,)
    """100% of
    them."""
    length: int | None = None
    files: tuple[Path, ...] = ()
    peer_python: Path | None = None
    run: bool = True


def test_options_are_read_by_their_types():
    line = "--folder a --size paper --rates 1 2e-3 --length 4 --files x y --peer-python p --no-run"
    read = parse(Sample, line.split())
    expected = Sample(
        folder=Path("a"),
        size="paper",
        rates=(1.0, 2e-3),
        length=4,
        files=(Path("x"), Path("y")),
        peer_python=Path("p"),
        run=False,
    )
    assert read == expected
    assert parse(Sample, ["--folder", "a"]) == Sample(folder=Path("a"))
    assert parse(Sample, ["--folder", "a", "--peer_python", "p", "--rates"]) == Sample(
        folder=Path("a"), peer_python=Path("p"), rates=()
    )


@pytest.mark.parametrize("line", ["", "--folder a --size large", "--folder a --lenght 4"])
def test_a_missing_wrong_or_unknown_option_is_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse(Sample, line.split())
    assert re.search(r"folder|tiny.*paper|lenght", capsys.readouterr().err)


def test_help_shows_the_text_below_a_field_and_its_default():
    text = " ".join(parser_of(Sample, description="Does.").format_help().split())
    assert "Does." in text
    assert "100% of them. (default: 0.5)" in text


def test_json_keeps_the_options():
    options = Sample(folder=Path("a"), rates=(1.0, 2.0), peer_python=Path("p"))
    read = from_json(Sample, to_json(options))
    assert read == options
    assert isinstance(read.rates, tuple)
    assert isinstance(read.peer_python, Path)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_is_used_by_a_test(name):
    assert not unused_options(name, Path(__file__).parent)


def test_all_programs_are_found():
    assert len(PROGRAMS) == 33
    other = set(with_a_command("benchmarks")) - set(PROGRAMS)
    # Those of `benchmarks.paper` read their options as `fwpkm` does and have tests of their own.
    known = ("peer_", "processes", "__main__", "cost", "loss_difference")
    assert all(name.split(".")[-1].startswith(known) for name in other)
