"""The report page: every result, the model and its task, its training, and all provenance."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.plot_style import DPI
from fwpkm_jax.evaluation.report import training, words
from fwpkm_jax.evaluation.suite import EVALS
from fwpkm_jax.whole_files import own_folder

# Text on the left, pictures and tables on the right; one below the other on a narrow screen.
_STYLE = """
body { max-width: 84rem; }
section { border-top: 1px solid #ddd; padding: 1.2rem 0 .6rem; }
section h2 { margin-top: 0; }
.columns { display: grid; grid-template-columns: minmax(0, 22rem) minmax(0, 1fr);
  column-gap: 2.5rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.finding { font-size: 1.1rem; line-height: 1.45; font-weight: 600; }
pre { background: #f6f6f4; padding: .8rem 1rem; }
summary { cursor: pointer; color: #0072B2; margin: .6rem 0; }
iframe { width: 100%; height: 32rem; border: 1px solid #ddd; }
dl { columns: 26rem; column-gap: 2.5rem; } dl div { break-inside: avoid; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1rem; }
@media (max-width: 56rem) { .columns { grid-template-columns: minmax(0, 1fr); } }
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
        results = [_result(record, Path(folder)) for record in records] or [_not_evaluated()]
        sections = [
            *results,
            _glossary(),
            _about(config, _read(run / "results.json")),
            _training(run, Path(folder)),
        ]
    sections += [_provenance(run, records), _configuration(config)]
    page = html.page(f"Run {run.resolve().name}", *sections, style=_STYLE)
    return html.save_page(page, own_folder(run / "results") / "report.html")


def _section(title: str, texts: Sequence[str], shown: Sequence[str]) -> str:
    """A section: heading and paragraphs, with pictures and tables beside them; all is markup."""
    text = "\n".join([html.heading(title), *texts])
    if not shown:
        return f"<section>{text}</section>"
    parts = "\n".join(shown)
    return f'<section class="columns"><div>{text}</div><div>{parts}</div></section>'


def _not_evaluated() -> str:
    text = html.paragraph("There are no results yet; fwpkm eval RUN adds them to this page.")
    return _section("Results", [text], [])


def _about(config: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    texts = (words.describe_model(config, results), words.describe_task(config))
    return _section("The model and its task", [html.paragraph(text) for text in texts], [])


def _training(run: Path, folder: Path) -> str:
    metrics = training.read_metrics(run / "metrics.jsonl")
    texts = (training.describe_training(metrics), training.describe_memory_curves(metrics))
    plots = [_show(path, "training curves") for path in training.plot_training(metrics, folder)]
    return _section("Training", [html.paragraph(text) for text in texts if text], _pictures(plots))


def _result(record: Mapping[str, Any], folder: Path) -> str:
    evaluation = EVALS[record["evaluation"]]
    texts, shown = [html.paragraph(evaluation.about)], []
    try:
        finding = evaluation.finding(record)
        texts = [html.paragraph(finding, kind="finding"), *texts] if finding else texts
        shown += _pictures(
            [_show(path, evaluation.title) for path in evaluation.plot(record, folder)]
        )
        shown.append(f"<pre>{html.escape(evaluation.table(record))}</pre>")
    except KeyError as missing:
        texts.append(
            html.paragraph(
                f"The file of this result has no {missing}: another version of the program wrote "
                f"it. fwpkm eval RUN --suite {record['evaluation']} replaces it."
            )
        )
    return _section(evaluation.title, texts, shown)


def _pictures(pictures: Sequence[str]) -> list[str]:
    return [f'<div class="pictures">{"".join(pictures)}</div>'] if pictures else []


def _show(path: Path, description: str) -> str:
    """Markup that embeds a PNG or HTML file in this page; empty for other files."""
    if path.suffix == ".png":
        return html.image(path, description=description, dpi=DPI)
    if path.suffix == ".html":
        content = html.escape(path.read_text(encoding="utf-8"))
        return f'<iframe sandbox title="{html.escape(description)}" srcdoc="{content}"></iframe>'
    return ""


def _glossary() -> str:
    entries = "".join(
        f"<div><dt>{html.escape(term)}</dt><dd>{html.escape(meaning)}</dd></div>"
        for term, meaning in words.GLOSSARY
    )
    return f"<details><summary>What the words mean</summary><dl>{entries}</dl></details>"


def _provenance(run: Path, records: list[dict[str, Any]]) -> str:
    parts = []
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
        parts += [
            html.paragraph("Training sessions", kind="small"),
            html.table(header, rows, kind="pairs"),
        ]
    for record in records:
        rows = [[name, value] for name, value in _flat(record["provenance"])]
        rows += [[f"option {name}", value] for name, value in _flat(record["config"])]
        parts.append(
            f"<details><summary>{html.escape(EVALS[record['evaluation']].title)}</summary>"
            f"{html.table(['', ''], rows, kind='pairs')}</details>"
        )
    return _section("Where the numbers come from", parts, [])


def _configuration(config: Mapping[str, Any]) -> str:
    rows = [[name, value] for name, value in _flat(config)]
    options = (
        "<details><summary>Every option of the run</summary>"
        f"{html.table(['option', 'value'], rows, kind='pairs')}</details>"
    )
    return _section("Configuration", [options], [])


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
