"""An audit as a table for a terminal, and as a self-contained page."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fwpkm_jax.audit.lines import SECTIONS, Line, failures
from fwpkm_jax.evaluation.display import html
from fwpkm_jax.io.terminal import shell_line

_STYLE = """
body { max-width: 72rem; }
td.pass { color: #00664b; } td.fail { color: #b00020; font-weight: 700; }
td.skipped { color: #666; }
.finding { font-size: 1.1rem; line-height: 1.45; font-weight: 600; }
td.name { min-width: 11rem; }
"""


def summary(lines: Sequence[Line]) -> str:
    """How many lines have which verdict, and the names of those that failed."""
    count = {
        verdict: sum(line.verdict == verdict for line in lines)
        for verdict in ("pass", "fail", "skipped")
    }
    failed = failures(lines)
    text = (
        f"{count['pass']} checks passed, {count['fail']} failed, {count['skipped']} were skipped."
    )
    return text + "".join(f"\nFAILED {line.section}, {line.name}: {line.text}" for line in failed)


def as_text(line: Line) -> str:
    """A line for a terminal."""
    return f"{line.verdict:8}{line.section}, {line.name}: {line.text}"


def page(
    lines: Sequence[Line],
    *,
    title: str,
    headline: str,
    figures: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> str:
    """The page's markup: headline, a table for each section, figures, and where all comes from."""
    body = [html.paragraph(headline, kind="finding"), html.paragraph(summary(lines))]
    for section, heading in SECTIONS.items():
        own = [line for line in lines if line.section == section]
        if own:
            body += [html.heading(heading), _table(own)]
    if figures:
        rows = [[name, text] for name, text in figures.items()]
        body += [html.heading("What was measured beside the headline")]
        body += [html.table(["", ""], rows, kind="pairs")]
    rows = [[name, _shown(value)] for name, value in provenance.items()]
    body += [html.heading("Where this comes from"), html.table(["", ""], rows, kind="pairs")]
    return html.page(title, *body, style=_STYLE)


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return shell_line(value)
    return value if isinstance(value, str) else json.dumps(value)


def _table(lines: Sequence[Line]) -> str:
    rows = [
        f'<tr><td class="{line.verdict}">{line.verdict}</td>'
        f'<td class="name">{html.escape(line.name)}</td><td>{html.escape(line.text)}</td></tr>'
        for line in lines
    ]
    head = "<tr><th>verdict</th><th>what was checked</th><th>what was found</th></tr>"
    return html.scrollable(f"<table>\n{head}\n" + "\n".join(rows) + "\n</table>")
