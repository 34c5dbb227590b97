"""The page `docs/reference/misuse.md`, made from the messages themselves.

python -m tests.misuse.page > docs/reference/misuse.md
"""

import re
import tempfile
from collections.abc import Iterator

from tests.misuse.cases import SECTIONS, Misuse

HEADER = """# Messages for wrong arguments

This page lists common mistakes and the message that each one gives. Every message names the
argument, what it is and what is expected. Shapes and names are checked when a function is called or
traced, so the checks cost no time in a compiled program.

The test `tests/misuse/test_misuse.py` makes each mistake and compares the message with this page:
`pytest tests/misuse -k names-1` runs the first row below. `python -m tests.misuse.page` prints the
page again.
"""


def cases() -> Iterator[tuple[str, Misuse]]:
    """All misuses with the names of their tests."""
    for section, misuses in SECTIONS.items():
        for number, misuse in enumerate(misuses, start=1):
            yield f"{section.split()[0].lower()}-{number}", misuse


def message(misuse: Misuse) -> str:
    """What the misuse is answered with, without what differs from run to run."""
    try:
        misuse.call()
    except (ValueError, RuntimeError) as error:
        text = str(error)
    else:
        raise AssertionError(f"{misuse.what} is accepted.")
    # Other tests may have registered names of their own.
    text = re.sub(r"registered rules \[[^]]*\]", "registered rules [...]", text)
    text = re.sub(r"is none of attention, swa[\w, ]*;", "is none of attention, swa, ...;", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "FOLDER", text)
    return re.sub(
        r"process \d+ on \S+ since [-\d]+ [:\d]+ \S+;", "process 12 on HOST since TIME;", text
    )


def row(name: str, misuse: Misuse) -> str:
    """One line of the page's tables."""
    text = message(misuse).replace("|", "\\|")
    return f"| {misuse.what} | `{text}` | {name} |"


def page() -> str:
    """The whole page."""
    parts, rows = [HEADER], {name: row(name, misuse) for name, misuse in cases()}
    for section in SECTIONS:
        prefix = f"{section.split()[0].lower()}-"
        own = [line for name, line in rows.items() if name.startswith(prefix)]
        parts.append(
            "\n".join(
                [f"## {section}", "", "| mistake | message | test |", "|---|---|---|", *own, ""]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
