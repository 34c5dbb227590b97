"""Runs the commands of a page and writes what they print into it.

    python -m lab.real_model.execute --page docs/tutorials/real_model.md --folder CLONE

Each block of `shell` is run by bash in FOLDER. A block of `text` right behind one is replaced by
what it printed, without what goes to the standard error.
"""

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import parse

_BLOCK = re.compile(r"^```shell\n(.*?)^```\n(\n```text\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the commands of a page and writes what they print into it."""

    page: Path
    """Markdown."""
    folder: Path
    """Where the commands run, as a new clone of the repository; also their home."""


def executed(page: str, folder: Path) -> str:
    """The page with the output of its commands.

    Raises:
      CalledProcessError: a command fails.
    """
    done, at = "", 0
    for block in _BLOCK.finditer(page):
        began = time.monotonic()
        environment = os.environ | {"HOME": str(folder)}
        environment.pop("PYTHONPATH", None)
        printed = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block[1]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        print(f"{time.monotonic() - began:.0f} s: {block[1]}{printed}", flush=True)
        done += page[at : block.end()]
        at = block.end()
        if block[2]:
            lines = printed.replace(str(folder), "~").splitlines()
            done += "".join(f"{line.rstrip()}\n" for line in lines)
            at = page.index("```", at)
    return done + page[at:]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv)
    page = executed(options.page.read_text(), options.folder.absolute())
    options.page.write_text(page)


if __name__ == "__main__":
    main()
