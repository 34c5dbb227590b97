"""Draws pictures and prints tables of the results of this folder's programs.

The tables are also in lab/archive/comparison.md and state_tracking.md.

python -m lab.comparison.tables
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.options import parse
from fwpkm_jax.evaluation.display.plot_style import GREY, TEXT, save_figure, set_title
from lab.comparison.mqar_tables import (
    mqar_picture,
    mqar_table,
    of_seeds,
    rows_by_settings,
    title,
)
from lab.comparison.small_decoders import Row


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draws and prints the results."""

    state_tracking: Path = Path("lab/results/state_tracking_cpu.jsonl")
    """Results of `state_tracking.py`."""
    mqar: Path = Path("lab/results/mqar_cpu.jsonl")
    """Results of `mqar.py`."""
    images: Path = Path("runs/pictures")
    """Folder for the pictures."""


@dataclass(frozen=True)
class Columns:
    """Columns of a heat map that belong together."""

    title: str
    labels: Sequence[str]


def heat_map(
    axes: Axes, values: np.ndarray, rows: Sequence[str], groups: Sequence[Columns]
) -> None:
    """Shares from 0 to 1, `[rows, columns]`, NaN where nothing was measured."""
    image = np.ma.masked_invalid(values)
    axes.imshow(image, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_facecolor("#F2F2F2")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            axes.text(
                *(column, row, f"{100 * value:.0f}"),
                **{"ha": "center", "va": "center", "fontsize": 7},
                color="white" if value > 0.6 else TEXT,
            )
    labels = [label for group in groups for label in group.labels]
    axes.set_xticks(range(len(labels)), labels, fontsize=7.5)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.tick_params(length=0, colors=TEXT)
    axes.spines[:].set_visible(False)
    start = 0
    for group in groups:
        width = len(group.labels)
        axes.text(
            *(start + width / 2 - 0.5, 1.01, group.title),
            **{"ha": "center", "fontsize": 8, "color": GREY},
            transform=axes.get_xaxis_transform(),
        )
        start += width
        axes.axvline(start - 0.5, color="white", lw=4)


def state_tracking_picture(rows: Sequence[Row]) -> Figure:
    """Draws accuracy by memory, task and position."""
    names = list(dict.fromkeys(row["rule"] for row in rows))
    found = defaultdict[tuple, list[float]](list)
    for row in rows:
        for span in row["spans"]:
            if span["accuracy"] is None:
                continue
            found[row["rule"], row["group"], span["above"], span["up_to"]].append(span["accuracy"])
    groups = list(dict.fromkeys(row["group"] for row in rows))
    spans = sorted({key[2:] for key in found})
    values = np.array(
        [
            [
                np.mean(found.get((name, group, *span), [np.nan]))
                for group in groups
                for span in spans
            ]
            for name in names
        ]
    )
    figure = Figure(figsize=(9.5, 1 + 0.26 * len(names)), layout="constrained")
    axes = figure.subplots()
    heat_map(axes, values, names, [Columns(g, [f"to {end}" for _, end in spans]) for g in groups])
    set_title(axes, "Labels right, %, by position", "")
    axes.set_xlabel("tokens of the document", fontsize=8, color=TEXT)
    return figure


def sizes(row: Row) -> str:
    """The settings of a run of state tracking in a few words."""
    about = row["settings"]
    text = (
        f"{about['steps']} steps of {about['batch_size']} documents of {about['length']} tokens; "
        f"width {about['width']}, layers {about['layers']}, {about['heads']} heads of "
        f"{about['head_dim']}, rate {about['learning_rate']:g}"
    )
    text += ", start token" * about["start_token"] + ", convolution" * about["convolution"]
    text += ", a label at every number" * about["every_value"]
    steps = about["delta_steps"]
    return text + (f", {steps} steps of DeltaProduct per token" if steps != 2 else "")


def state_tracking_table(rows: Sequence[Row]) -> str:
    """Accuracy within the training length and in the last range, by task, as Markdown.

    Over seeds as in `of_seeds`.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    ends = [(s["above"], s["up_to"]) for s in (rows[0]["spans"][0], rows[0]["spans"][-1])]
    heads = ["memory", "bytes", "seeds"]
    heads += [f"{group}, tokens {a + 1}-{b}" for group in groups for a, b in ends]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == name]
        seeds = sorted({sum(row["group"] == group for row in own) for group in groups} - {0})
        cells = [f"`{name}`", str(own[0]["state_bytes"]), " to ".join(map(str, seeds))]
        for group, index in itertools.product(groups, (0, -1)):
            shares = [row["spans"][index]["accuracy"] for row in own if row["group"] == group]
            shares = [share for share in shares if share is not None]
            cells.append(of_seeds(shares) if shares else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spans_table(rows: Sequence[Row]) -> str:
    """Accuracy of each run by range of positions, as Markdown, and the loss at the end of training.

    All rows have the same ranges.
    """
    spans = [(span["above"], span["up_to"]) for span in rows[0]["spans"]]
    heads = ["rule", "steps", "documents", "heads", "width", "rate", "seed"]
    heads += [f"tokens {above + 1}-{end}" for above, end in spans]
    heads += ["loss", "CPU minutes"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        about = row["settings"]
        cells = [f"`{row['rule']}`"]
        cells += [str(about[key]) for key in ("steps", "batch_size", "heads", "width")]
        cells += [f"{about['learning_rate']:g}", str(row["seed"])]
        for span in row["spans"]:
            share = span["accuracy"]
            cells.append("" if share is None else f"{share:.3f}")
        cells += [f"{row['loss']:.3f}", f"{row['cpu_seconds'] / 60:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the pictures and prints the tables of the existing results."""
    options = parse(Options, argv, description=__doc__)
    if options.state_tracking.exists():
        groups = rows_by_settings(options.state_tracking)
        save_figure(state_tracking_picture(groups[0]), options.images / "comparison_states.png")
        print(*(f"\n{sizes(group[0])}\n\n{state_tracking_table(group)}" for group in groups))
    if options.mqar.exists():
        groups = rows_by_settings(options.mqar)
        save_figure(mqar_picture(groups), options.images / "comparison_mqar.png")
        print(*(f"\n{title(group[0])}\n\n{mqar_table(group)}" for group in groups), sep="\n")


if __name__ == "__main__":
    main()
