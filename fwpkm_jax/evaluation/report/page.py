"""The report page: every result, the model and its task, its training, and all provenance."""

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.plot_style import DPI, drawn
from fwpkm_jax.evaluation.registry import EVALS
from fwpkm_jax.evaluation.report import training, words
from fwpkm_jax.io.atomic import own_folder
from fwpkm_jax.io.terminal import shell_line
from fwpkm_jax.io.untrusted import OutsideFileError, read_json, reading, refuse_link

logger = logging.getLogger(__name__)

_COPY = "put back a copy: each checkpoint has one, checkpoints/STEP/config/metadata"
_RESUME = "delete it; resuming the run writes it again"

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
.command { white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 40rem) { .pictures { overflow-x: auto; } img.broad { max-width: none; } }
@media (max-width: 56rem) { .columns { grid-template-columns: minmax(0, 1fr); } }
"""


def write_report(run: str | Path) -> Path:
    """Writes RUN/results/report.html from what the run directory holds; returns its path.

    A result whose file is damaged or of another form is left out, with a warning that names it.

    Raises:
      FileNotFoundError: there is no run.
      OutsideFileError: the run's configuration or log cannot be read.
    """
    run = Path(run)
    config = _read(run / "config.json", otherwise=_COPY)
    if config is None:
        raise FileNotFoundError(f"{run / 'config.json'} does not exist; {run} holds no run.")
    found = read_results(run)
    with tempfile.TemporaryDirectory() as folder:
        results = [_result(path, record, Path(folder)) for path, record in found.items()]
        summary = run / "results.json"
        nothing = html.paragraph("There are no results yet; fwpkm eval RUN adds them to this page.")
        sections = [*(results or [_section("Results", [nothing], [])]), _glossary()]
        with _showing(run / "config.json", otherwise=_COPY):
            model = words.describe_model(config, None)
            task = words.describe_task(config)
        if (numbers := _read(summary, otherwise=_RESUME)) is not None:
            with _showing(summary, otherwise=_RESUME):
                model = words.describe_model(config, numbers)
        sections.append(
            _section("The model and its task", [*map(html.paragraph, (model, task))], [])
        )
        with _showing(run / "metrics.jsonl", otherwise="delete the line that is damaged"):
            sections.append(_training(run, Path(folder)))
    sections.append(_provenance(run, found))
    with _showing(run / "config.json", otherwise=_COPY):
        table = html.table(["option", "value"], list(map(list, _flat(config))), kind="pairs")
    options = f"<details><summary>Every option of the run</summary>{table}</details>"
    sections.append(_section("Configuration", [options], []))
    page = html.page(f"Run {run.resolve().name}", *sections, style=_STYLE)
    return html.save_page(page, own_folder(run / "results") / "report.html")


def _section(title: str, texts: Sequence[str], shown: Sequence[str]) -> str:
    """A section: heading and paragraphs, with pictures and tables beside them; all is markup."""
    text = "\n".join([html.heading(title), *texts])
    if not shown:
        return f"<section>{text}</section>"
    beside = "\n".join(shown)
    return f'<section class="columns"><div>{text}</div><div>{beside}</div></section>'


def _training(run: Path, folder: Path) -> str:
    metrics = training.read_metrics(run / "metrics.jsonl")
    texts = (training.describe_training(metrics), training.describe_memory_curves(metrics))
    plots = [
        _show(path, "training curves") for path in drawn(training.plot_training, metrics, folder)
    ]
    return _section("Training", [html.paragraph(text) for text in texts if text], _pictures(plots))


def _result(path: Path, record: Mapping[str, Any], folder: Path) -> str:
    evaluation = EVALS.get(record["evaluation"])
    if evaluation is None:
        return _unknown(record)
    texts, shown = [html.paragraph(evaluation.about)], []
    if evaluation.controls is not None:
        texts.append(html.paragraph(evaluation.controls_line(), kind="small"))
    try:
        again = f"fwpkm eval RUN --suite {record['evaluation']} replaces it"
        with _showing(path, otherwise=again):
            finding = evaluation.finding(record)
            pictures = [
                _show(path, evaluation.title) for path in drawn(evaluation.plot, record, folder)
            ]
            table = f"<pre>{html.escape(evaluation.table(record))}</pre>"
    except OutsideFileError as error:
        logger.warning("%s", error)
        texts.append(html.paragraph(str(error)))
    else:
        texts = [html.paragraph(finding, kind="finding"), *texts] if finding else texts
        shown = [*_pictures(pictures), table]
    return _section(evaluation.title, texts, shown)


def _unknown(record: Mapping[str, Any]) -> str:
    """A section of an evaluation that a package registers which this program did not import."""
    told = (
        "This evaluation comes from another package, which a report does not import; fwpkm eval "
        "RUN --plugins PACKAGE writes a report with its views. Its single numbers:"
    )
    numbers = [
        [name, value]
        for name, value in _flat(record["results"])
        if not value.startswith(("[", "{"))
    ]
    shown = [html.table(["number", "value"], numbers, kind="pairs")]
    return _section(record["evaluation"], [html.paragraph(told)], shown)


def _showing(path: Path, *, otherwise: str) -> AbstractContextManager[None]:
    """While values of a file are shown, whatever is wrong with them is the file's fault."""
    return reading(path, problem="has another form than this version shows", otherwise=otherwise)


def read_results(run: Path) -> dict[Path, dict[str, Any]]:
    """The records of a run's results by file, in the order of `EVALS`.

    A result whose file is damaged is left out, with a warning that names it.
    """
    files = sorted(path for path in (run / "results").glob("*.json") if path.is_file())
    found = {path: record for path in files if (record := _record(path)) is not None}
    names = list(EVALS)

    def place(path: Path) -> int:
        name = found[path]["evaluation"]
        return names.index(name) if name in EVALS else len(names)

    return {path: found[path] for path in sorted(found, key=place)}


def _record(path: Path) -> dict[str, Any] | None:
    """A result; None, with a warning, for a damaged one, and for what is no result of ours."""
    try:
        record = _read(path, otherwise="delete it, and evaluate the run again")
    except OutsideFileError as error:
        logger.warning("%s", error)
        return None
    if record is None or not isinstance(record.get("evaluation"), str):
        return None
    ours = record["evaluation"] in EVALS
    whole = all(isinstance(record.get(name), dict) for name in ("provenance", "results"))
    return record if ours or whole else None


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


def _provenance(run: Path, records: Mapping[Path, dict[str, Any]]) -> str:
    tables = []
    path = run / "environment.json"
    environment = _read(path, otherwise="delete it") or {"sessions": []}
    with _showing(path, otherwise="delete it"):
        commands = [shell_line(session["command"]) for session in environment["sessions"]]
        rows = [
            [
                session["from_step"],
                session["started"],
                session["commit"] or "unknown",
                f"{session['device_count']} {session['device_kind']}",
                ", ".join(f"{name} {version}" for name, version in session["versions"].items()),
            ]
            for session in environment["sessions"]
        ]
    if rows:
        header = ["from step", "started", "commit", "device", "versions"]
        tables += [
            html.paragraph("Training sessions", kind="small"),
            html.table(header, rows, kind="pairs"),
            html.paragraph("Their commands", kind="small"),
            *(f'<pre class="command">{html.escape(line)}</pre>' for line in commands),
        ]
    for record in records.values():
        rows = [[name, value] for name, value in _flat(record.get("provenance"))]
        rows += [[f"option {name}", value] for name, value in _flat(record.get("config"))]
        name = record["evaluation"]
        title = EVALS[name].title if name in EVALS else name
        tables.append(
            f"<details><summary>{html.escape(title)}</summary>"
            f"{html.table(['', ''], rows, kind='pairs')}</details>"
        )
    return _section("Where the numbers come from", tables, [])


def _flat(values: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as pairs of a dotted name and a text; what is not nested has none."""
    values = values if isinstance(values, Mapping) else {}
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append(
                (f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value))
            )
    return pairs


def _read(path: Path, *, otherwise: str) -> dict[str, Any] | None:
    refuse_link(path)  # A page is passed on.
    return read_json(path, otherwise=otherwise, kind=dict) if path.is_file() else None
