"""The table of a gate map, and its page of shaded text."""

from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.tables import Record, format_table

USED = (
    "A memory layer mixes two things into each token: what it reads from its memory, which holds "
    "what the text said earlier, and the token's own value. The gate is the share of the read, "
    "between 0 and 1. Dark tokens lean on the memory, light ones do without. Each layer has a "
    "scale of its own, from its lowest gates to its highest: compare tokens by their shade, layers "
    "by the table. Point at a token for its numbers."
)
UNUSED = (
    "This model adds its reads in full, without a gate (gate_output=False). The gate below does "
    "not change the output, so the text is not shaded. Point at a token for its numbers."
)
_SHADES = 20
_STYLE = """
.map { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; }
.map span { padding: .12em 0; }
.key { width: min(16rem, 40vw); height: 1rem; border: 1px solid #ccc; display: inline-block;
  vertical-align: -.15rem; margin: 0 .5rem; background: linear-gradient(to right, #fff, #3f8fd6); }
""" + "".join(
    # White to blue; text stays readable on the darkest shade.
    f".g{shade} {{ background: rgb({255 - 192 * shade // _SHADES}, "
    f"{255 - 112 * shade // _SHADES}, {255 - 41 * shade // _SHADES}); }}\n"
    for shade in range(_SHADES + 1)
)


def table(record: Record) -> str:
    """Mean and spread of each layer's gates."""
    results = record["results"]
    header = ["memory", "tokens", "mean", "lowest", "highest", "above 0.5"]
    title = f"Gates along {results['document']}, {_written(record)}"
    return f"{title}\n{format_table(header, [_texts(row) for row in _rows(results)])}"


def plot(record: Record, directory: Path) -> list[Path]:
    """Writes `gate_map.html`: the text once per memory layer, shaded by its gates."""
    results = record["results"]
    body = [
        html.paragraph(USED if results["gate_mixes"] else UNUSED),
        html.paragraph(f"{results['document']}, {_written(record)}", kind="small"),
        html.table(
            ["memory", "tokens", "mean gate", "lowest", "highest", "share above 0.5"],
            _rows(results),
        ),
    ]
    for layer, gates in results["gates"].items():
        low, high = _scale(gates)
        body.append(html.heading(layer.replace("_", " ")))
        if results["gate_mixes"]:
            key = '<span class="key"></span>'
            body.append(f'<p class="small">gate {low:.2f} or less{key}{high:.2f} or more</p>')
        spans = "".join(
            _span(text, gate, loss, shade=_shade(gate, low, high) if results["gate_mixes"] else 0)
            for text, gate, loss in zip(results["texts"], gates, results["losses"], strict=True)
        )
        body.append(f'<div class="map mono">{spans}</div>')
    page = html.page("Where the model uses its memory", *body, style=_STYLE)
    return [html.save_page(page, directory / "gate_map.html")]


def _scale(gates: list[float]) -> tuple[float, float]:
    """The gates shown lightest and darkest: the 1st and the 99th percentile."""
    low, high = np.quantile(gates, (0.01, 0.99))
    return float(low), max(float(high), float(low) + 0.01)  # Equal gates are all light.


def _shade(gate: float, low: float, high: float) -> int:
    return round(_SHADES * min(max((gate - low) / (high - low), 0.0), 1.0))


def _span(text: str, gate: float, loss: float, *, shade: int) -> str:
    """A token's markup; shade 0 is white."""
    shown = html.show_token(text) or "\u00b7"
    # The line break follows its visible sign, so that the sign is shaded too.
    end = "\n" if text.endswith("\n") else ""
    title = f"gate {gate:.3f}, loss of the next token {loss:.2f}"
    return f'<span class="g{shade}" title="{title}">{shown}</span>{end}'


def _rows(results: Record) -> list[list[Any]]:
    rows = []
    for layer, gates in results["gates"].items():
        values = np.array(gates)
        measures = (values.mean(), values.min(), values.max(), (values > 0.5).mean())
        rows.append([layer, len(gates), *(round(float(value), 3) for value in measures)])
    return rows


def _texts(row: list[Any]) -> list[str]:
    return [row[0], f"{row[1]:,}", *(f"{value:.3f}" for value in row[2:])]


def _written(record: Record) -> str:
    config = record["config"]
    if not config["write"]:
        return "memory as the checkpoint has it"
    return f"one write per {config['chunk_size']} tokens"
