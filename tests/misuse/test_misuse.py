"""Every misuse gives the message that docs/reference/misuse.md promises, in one line."""

from pathlib import Path

import pytest

from tests.misuse.page import cases, message, row

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "misuse.md").read_text()
CASES = dict(cases())


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("name", CASES)
def test_a_misuse_is_answered_by_the_line_on_the_page(name):
    assert row(name, CASES[name]) in PAGE.splitlines()
    assert "\n" not in message(CASES[name])


def test_the_page_lists_no_other_misuse():
    names = [line.rsplit("|", 2)[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert [name for name in names if name != "test"] == list(CASES)
