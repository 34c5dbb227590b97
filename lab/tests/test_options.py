"""Every option of the laboratory's programs is tried by a test."""

from pathlib import Path

import pytest

from tests.benchmarks.tried import programs_of, unused_options, with_a_command

PROGRAMS = programs_of("lab")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_is_used_by_a_test(name):
    assert not unused_options(name, Path(__file__).parent)


def test_all_programs_are_found():
    # Seeded faults have a parser of their own.
    own = {"lab.seeded_faults.__main__"}
    assert set(with_a_command("lab")) - set(PROGRAMS) == own
