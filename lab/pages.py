"""Writes what the measurements, README and the archive say of the lines that programs stored.

    python -m lab.pages           # rewrites what differs
    python -m lab.pages --draw    # draws the pages' pictures, too
    python -m lab.pages --check   # names what differs, and fails

A comment stands before each paragraph, list or table of a finding, up to the next empty line:

    <!-- finding: recall table -->

It names a module of `lab.findings` and a function of it. In the archive and in logs a comment
stands before each table that is made so, and says from what:

    <!-- table: domains retention_plain_text_cpu.jsonl order=given columns="write|runs" -->

It names an entry of `TABLES` and a file in a folder of `RESULTS`, or several. A
word NAME=VALUE keeps the lines whose entry NAME is VALUE; a dot leads into an entry
(`settings.epochs=8`). `rows`, `without` and `columns` are regular expressions: of rows to show or
to leave out, of heads of columns to show.
"""

import importlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bring_up.tables import account_table, schedule_table, steps_table
from benchmarks.options import parse
from lab.archive import tables as archived
from lab.comparison.mqar_tables import mqar_table, rates_table, recall_by_seed
from lab.comparison.tables import spans_table, state_tracking_table
from lab.findings import FINDINGS, PARTS, drawing
from lab.findings.stored import RESULTS, markdown, path_of
from lab.study import plain_text, retention_tables, shipped, tables
from lab.study.real_size.tables import table as real_size_table
from lab.study.study import DOMAINS

Line = dict[str, Any]


def rows_table(lines: Sequence[Line]) -> str:
    """Every line with its numbers and words as they are; those of an entry's entries, too."""
    found = [dict(_scalars(line)) for line in lines]
    heads = dict.fromkeys(name for line in found for name in line)
    shown = [[_as_shown(line.get(name)) for name in heads] for line in found]
    return markdown([*heads], shown)


def _scalars(line: Line, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{before}{name}.")
        elif not isinstance(value, list):
            yield before + name, value


def _as_shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


TABLES: dict[str, Callable[[list[Line]], str]] = {
    "mqar": mqar_table,
    "mqar_rates": rates_table,
    "mqar_heads": archived.mqar_heads,
    "recall_by_seed": recall_by_seed,
    "state_tracking": state_tracking_table,
    "spans": spans_table,
    "perplexity": tables.perplexity_table,
    "needles": tables.needle_table,
    "needles_keys_still": tables.still_table,
    "needles_reference": tables.reference_table,
    "controls": tables.control_table,
    "gates": tables.gate_table,
    "longbench": tables.longbench_table,
    "six_domains": partial(tables.continual_table, domains=DOMAINS),
    "plain_text": plain_text.table,
    "plain_text_rates": plain_text.rates_table,
    "plain_text_differences": plain_text.differences,
    "beside_attention": archived.beside_attention,
    "retrofit": archived.retrofit,
    "lasting_text": archived.lasting_text,
    "packed": archived.packed,
    "packed_differences": archived.packed_differences,
    "facts": retention_tables.facts_table,
    "forgetting": retention_tables.forgetting_table,
    "domains": retention_tables.domains_table,
    "each_domain": retention_tables.each_domain_table,
    "unread": retention_tables.unread_table,
    "beside_plain": retention_tables.beside_plain_table,
    "text": retention_tables.text_table,
    "cost": retention_tables.cost_table,
    "facts_by_gradient": archived.facts_by_gradient,
    "lasting": archived.lasting,
    "shipped": shipped.table,
    "real_size": real_size_table,
    "gates_by_step": shipped.gates_table,
    "steps": steps_table,
    "account": account_table,
    "schedule": schedule_table,
    "fast_weight_layers": archived.fast_weight_layers,
    "users": archived.users,
    "rows": rows_table,
}
"""What makes a table of lines, by the name that a comment has for it."""

COMMENT = re.compile(r"^ *<!-- table: (.+) -->$")
FINDING = re.compile(r"^<!-- finding: (\w+) (\w+) -->$")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Writes findings and tables into pages."""

    pages: tuple[Path, ...] = (Path("docs/measurements"), Path("lab/archive"), Path("README.md"))
    """Folders of pages, Markdown, and pages."""
    images: Path = Path("docs/images/findings")
    """Folder of the pictures of the findings."""
    draw: bool = False
    """Draws the pictures."""
    results: tuple[Path, ...] = tuple(map(Path, RESULTS))
    """Folders of the lines; the first that has a file is taken."""
    check: bool = False
    """Only names the pages that differ, and fails if there is one."""


def table(about: str, results: Sequence[Path]) -> str:
    """The table that a comment asks for.

    Args:
      about: the comment's words after `table:`.
      results: folders of the lines.

    Raises:
      ValueError: the comment names no known table, or lines or rows that are not there.
      FileNotFoundError: no folder has a file that it names.
    """
    name, *words = shlex.split(about)
    files = [word for word in words if "=" not in word]
    if name not in TABLES:
        raise ValueError(f"{about!r}: {name} is none of {tuple(TABLES)}.")
    asked = dict(word.split("=", 1) for word in words if "=" in word)
    shown = {key: asked.pop(key, "") for key in ("rows", "without", "columns")}
    stored = [line for file in files for line in read_lines(path_of(file, results))]
    lines = [line for line in stored if _matches(line, asked)]
    if not lines:
        raise ValueError(f"{about!r}: no line of {files} has {asked}.")
    return _chosen(about, TABLES[name](lines), **shown)


def read_lines(path: Path) -> list[Line]:
    """The lines of a .jsonl file; of a .json file its rows, its models, or all of it as one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        found = json.loads(text)
        if "models" in found:
            return [{"model": name, **about} for name, about in found["models"].items()]
        if isinstance(found, list):
            return found
        rows = found.get("rows")
        return rows if isinstance(rows, list) else [found]
    return [json.loads(line) for line in text.splitlines()]


def _matches(line: Line, asked: dict[str, str]) -> bool:
    def entry(name: str) -> Any:
        found: Any = line
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    return all(str(entry(name)) == value for name, value in asked.items())


def _chosen(about: str, text: str, *, rows: str, without: str, columns: str) -> str:
    """The part of a Markdown table whose rows and columns match."""
    head, _, *body = text.splitlines()
    body = [row for row in body if re.search(rows, row)]
    body = [row for row in body if not (without and re.search(without, row))]
    names = _cells(head)
    kept = [number for number, one in enumerate(names) if re.search(columns, one)]
    if not (body and kept):
        raise ValueError(f"{about!r} leaves nothing of a table with the columns {names}.")
    head, *body = (
        f"| {' | '.join(_cells(row)[number] for number in kept)} |" for row in (head, *body)
    )
    return "\n".join((head, "|---" * len(kept) + "|", *body))


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def finding(name: str, part: str) -> str:
    """The part of a finding that a comment asks for.

    Raises:
      ValueError: there is no such finding, or no such part of it.
    """
    if name not in FINDINGS:
        raise ValueError(f"finding: {name} is none of {FINDINGS}.")
    module = importlib.import_module(f"lab.findings.{name}")
    if part not in PARTS or not hasattr(module, part):
        raise ValueError(f"finding: {name} has no {part} of {PARTS}.")
    return getattr(module, part)()


def written(page: str, results: Sequence[Path]) -> str:
    """The page with each part that has a comment as its lines make it."""
    found: list[str] = []
    old = re.compile("(?!)")  # Rows behind a comment that match are replaced.
    for row in page.splitlines():
        if old.match(row):
            continue
        old = re.compile("(?!)")
        found.append(row)
        if match := COMMENT.match(row):
            old = re.compile(r" *\|")
            indent = row[: len(row) - len(row.lstrip())]
            found += [indent + one for one in table(match[1], results).splitlines()]
        if match := FINDING.match(row):
            old = re.compile(r".*\S")
            found += finding(match[1], match[2]).splitlines()
    return "\n".join(found) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the pages, or names those that differ."""
    options = parse(Options, argv, description=__doc__)
    differ = []
    pages = [sorted(path.rglob("*.md")) if path.is_dir() else [path] for path in options.pages]
    for path in itertools.chain.from_iterable(pages):
        page = path.read_text(encoding="utf-8")
        try:
            made = written(page, options.results)
        except (ValueError, OSError) as error:
            raise SystemExit(f"{path}: {error}") from None
        if made != page:
            differ.append(str(path))
            if not options.check:
                path.write_text(made, encoding="utf-8")
    if options.draw:
        for name in FINDINGS:
            module = importlib.import_module(f"lab.findings.{name}")
            if hasattr(module, "draw"):
                drawing.save(module.draw(), options.images / f"{name}.svg")
    print(*differ, sep="\n")
    if differ and options.check:
        raise SystemExit("They do not say what the lines say; write them with python -m lab.pages.")


if __name__ == "__main__":
    main()
