"""Every number of README and of the pages of measurements is derived, or said to be a choice."""

import pytest

from benchmarks.processes import ROOT
from lab.findings import prose

MEASURED = prose.measured()


@pytest.mark.parametrize("name", MEASURED)
def test_no_number_of_a_page_is_without_a_source(name):
    path = ROOT / name if name == "README.md" else ROOT / "docs/measurements" / name
    page = path.read_text(encoding="utf-8")
    missing, left = prose.left_over(page, (*MEASURED[name], *prose.SET[name]))
    assert not missing, "the lines say otherwise"
    assert not left, "derive it in lab/findings/prose.py, or take it out"


def test_what_the_demo_knew_is_what_its_card_says():
    card = (ROOT / "fwpkm_jax/demo/README.md").read_text(encoding="utf-8")
    found = [line for line in card.splitlines() if " of " in line and line.startswith("| ")]
    assert [line for line in found if " of 48" in line] == prose.demo_rows()


PAGE = """# Title 3

<!-- finding: a table -->
| 1 | 2 |

Of `4` texts 0.5
are right (2026-11-27, jax 0.10.2), an H200 and [this](page_7.md).

```bash
run --steps 8
```

It has 9 rows.
"""


def test_numbers_without_a_phrase_are_found_and_others_are_not():
    missing, left = prose.left_over(PAGE, ("texts 0.5 are right", "not there"))
    assert missing == ["not there"]
    assert len(left) == 2
    assert "Title 3" in left[0]
    assert "It has 9 rows" in left[1]
    assert prose.left_over(PAGE, ("texts 0.5 are", "Title 3", "9 rows")) == ([], [])
