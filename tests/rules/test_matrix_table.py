"""The tables and the example in docs/explanation/family.md are true."""

import doctest
from pathlib import Path

import pytest

from fwpkm_jax.rules.matrix.table import family_tables

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "family.md"


def test_the_page_shows_what_the_rules_declare():
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    shown, end, _ = rest.partition("<!-- end of tables -->")
    command = "python -m fwpkm_jax.rules.matrix.table"
    assert end, "the marks around the tables are gone"
    assert shown == f"\n{family_tables()}\n", f"replace the tables by what `{command}` prints"


@pytest.mark.thorough
def test_the_example_gives_what_it_shows():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
