"""The page: what the run is, how it trained, every result, and where all of it comes from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.plot_style import DPI
from fwpkm_jax.evaluation.report import training, words
from fwpkm_jax.evaluation.suite import EVALS

_STYLE = """
pre { background: #f6f6f4; padding: .8rem 1rem; }
summary { cursor: pointer; color: #0072B2; margin: .6rem 0; }
iframe { width: 100%; height: 32rem; border: 1px solid #ddd; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; max-width: 45rem; }
"""


def write_report(run: str | Path) -> Path:
    """Writes RUN/results/report.html from what the run directory holds; returns its path.

    Raises:
      FileNotFoundError: there is no run.
    """
    run = Path(run)
    config = _read(run / "config.json")
    if config is None:
        raise FileNotFoundError(f"{run / 'config.json'} does not exist; {run} holds no run.")
    records = [
        record
        for path in sorted((run / "results").glob("*.json"))
        if (record := _read(path)) and record.get("evaluation") in EVALS
    ]
    records.sort(key=lambda record: list(EVALS).index(record["evaluation"]))
    with tempfile.TemporaryDirectory() as folder:
        sections = [
            html.paragraph(words.describe_model(config, _read(run / "results.json"))),
            html.paragraph(words.describe_task(config)),
            _glossary(),
            *_training(run, Path(folder)),
            *(_result(record, Path(folder)) for record in records),
        ]
    if not records:
        sections.append(
            html.paragraph("Nothing was evaluated yet: fwpkm eval RUN does it, and adds here.")
        )
    sections += [_provenance(run, records), _configuration(config)]
    page = html.page(f"Run {run.resolve().name}", *sections, style=_STYLE)
    return html.save_page(page, run / "results" / "report.html")


def _training(run: Path, folder: Path) -> list[str]:
    metrics = training.read_metrics(run / "metrics.jsonl")
    texts = (training.describe_training(metrics), training.describe_memory_curves(metrics))
    return [
        html.heading("Training"),
        *(html.paragraph(text) for text in texts if text),
        *(_show(path, "training curves") for path in training.plot_training(metrics, folder)),
    ]


def _result(record: Mapping[str, Any], folder: Path) -> str:
    evaluation = EVALS[record["evaluation"]]
    parts = [html.heading(evaluation.title), html.paragraph(evaluation.about)]
    try:
        finding = evaluation.finding(record)
        parts += [html.paragraph(finding)] if finding else []
        parts += [_show(path, evaluation.title) for path in evaluation.plot(record, folder)]
        parts.append(f"<pre>{html.escape(evaluation.table(record))}</pre>")
    except KeyError as missing:
        parts.append(
            html.paragraph(
                f"The file of this result has no {missing}: another version of the program wrote "
                f"it. fwpkm eval RUN --suite {record['evaluation']} makes it anew."
            )
        )
    return "\n".join(parts)


def _show(path: Path, description: str) -> str:
    """A picture, or a page, within this page."""
    if path.suffix == ".png":
        return html.image(path, description=description, dpi=DPI)
    if path.suffix == ".html":
        content = html.escape(path.read_text(encoding="utf-8"))
        return f'<iframe sandbox title="{html.escape(description)}" srcdoc="{content}"></iframe>'
    return ""


def _glossary() -> str:
    entries = "".join(
        f"<dt>{html.escape(term)}</dt><dd>{html.escape(meaning)}</dd>"
        for term, meaning in words.GLOSSARY
    )
    return f"<details open><summary>What the words mean</summary><dl>{entries}</dl></details>"


def _provenance(run: Path, records: list[dict[str, Any]]) -> str:
    parts = [html.heading("Where the numbers come from")]
    environment = _read(run / "environment.json") or {"sessions": []}
    rows = [
        [
            session["from_step"],
            session["started"],
            session["commit"] or "unknown",
            f"{session['device_count']} {session['device_kind']}",
            ", ".join(f"{name} {version}" for name, version in session["versions"].items()),
            " ".join(session["command"]),
        ]
        for session in environment["sessions"]
    ]
    if rows:
        header = ["from step", "started", "commit", "device", "versions", "command"]
        parts += [html.paragraph("Training sessions", kind="small"), html.table(header, rows)]
    for record in records:
        rows = [[name, value] for name, value in _flat(record["provenance"])]
        rows += [[f"option {name}", value] for name, value in _flat(record["config"])]
        parts.append(
            f"<details><summary>{html.escape(EVALS[record['evaluation']].title)}</summary>"
            f"{html.table(['', ''], rows)}</details>"
        )
    return "\n".join(parts)


def _configuration(config: Mapping[str, Any]) -> str:
    return (
        html.heading("Configuration")
        + "<details><summary>Every option of the run</summary>"
        + html.table(["option", "value"], [[name, value] for name, value in _flat(config)])
        + "</details>"
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as pairs of a dotted name and a text."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append(
                (f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value))
            )
    return pairs


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
