"""Draws pictures and prints tables of the results of this folder's programs.

The page that shows them is docs/measurements/comparison.md.

python -m benchmarks.comparison.tables
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.comparison.mqar_tables import mqar_picture, mqar_table, rows_by_settings, title
from benchmarks.comparison.small_decoders import Row
from benchmarks.options import parse
from fwpkm_jax.evaluation.display.plot_style import GREY, TEXT, save_figure, set_title

CHANCE = 1 / 32
"""Probability that a guess is right in the recall task, which has 32 values."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Draws and prints the results."""

    recall: Path = Path("benchmarks/results/recall_cpu.json")
    """Results of `recall.py`."""
    state_tracking: Path = Path("benchmarks/results/state_tracking_cpu.jsonl")
    """Results of `state_tracking.py`."""
    mqar: Path = Path("benchmarks/results/mqar_cpu.jsonl")
    """Results of `mqar.py`."""
    images: Path = Path("docs/images")
    """Folder for the pictures."""


@dataclass(frozen=True)
class Columns:
    """Columns of a heat map that belong together."""

    title: str
    labels: Sequence[str]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds, and the largest value minus the smallest."""
    return float(np.mean(values)), float(np.max(values) - np.min(values))


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


def size(budget: int | None) -> str:
    """A number of bytes as text; None stands for an unlimited state."""
    if budget is None:
        return "own size"
    return f"{budget // 1024} KiB" if budget >= 1024 else f"{budget} B"


def names_in_order(rows: Sequence[Row]) -> list[str]:
    """Rules in order of appearance; those with unlimited state come last."""
    names = dict.fromkeys(row["rule"] for row in rows if row.get("budget", 0) is not None)
    return [*names, *dict.fromkeys(row["rule"] for row in rows if row["rule"] not in names)]


def recall_picture(rows: Sequence[Row]) -> Figure:
    """Draws accuracy by memory, state and pairs; one panel per length."""
    names = names_in_order(rows)
    found = defaultdict[tuple, list[float]](list)
    for row in rows:
        for cell in row["cells"]:
            key = (row["rule"], row["budget"], cell["pairs"], cell["length"])
            found[key].append(cell["accuracy"])
    budgets = sorted({budget for _, budget, *_ in found}, key=lambda b: np.inf if b is None else b)
    pairs, lengths = (sorted({key[i] for key in found}) for i in (2, 3))
    columns = [(budget, count) for budget in budgets for count in pairs]
    figure = Figure(figsize=(9.5, (1 + 0.26 * len(names)) * len(lengths)), layout="constrained")
    for axes, length in zip(
        figure.subplots(len(lengths), squeeze=False)[:, 0], lengths, strict=True
    ):
        values = np.array(
            [
                [
                    np.mean(found.get((name, budget, count, length), [np.nan]))
                    for budget, count in columns
                ]
                for name in names
            ]
        )
        heat_map(axes, values, names, [Columns(size(b), [str(n) for n in pairs]) for b in budgets])
        set_title(axes, f"Answers right, %, documents of {length} tokens", "")
        axes.set_xlabel("pairs stated, by size of the state", fontsize=8, color=TEXT)
    return figure


def state_tracking_picture(rows: Sequence[Row]) -> Figure:
    """Draws accuracy by memory, task and position."""
    names = names_in_order(rows)
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


def pairs_recalled(row: Row, length: int) -> float:
    """The most pairs that a decoder recalls: stated pairs times accuracy corrected for guessing."""
    shares = [
        cell["pairs"] * (cell["accuracy"] - CHANCE) / (1 - CHANCE)
        for cell in row["cells"]
        if cell["length"] == length
    ]
    return max(0.0, *shares)


def recall_table(rows: Sequence[Row], length: int) -> str:
    """Accuracy by pairs, pairs recalled, and these per KiB that a token touches, as Markdown.

    Rows are sorted by size, then by pairs recalled. For FwPKM two numbers of bytes are given: the
    slots alone, and the slots with the scored sub-keys. Values are means over seeds; the spread is
    the largest minus the smallest.
    """
    shown = [cell for row in rows for cell in row["cells"] if cell["length"] == length]
    pairs = sorted({cell["pairs"] for cell in shown})
    header = [
        "memory",
        "budget",
        "state, bytes",
        "touched per token",
        *(f"{n} pairs" for n in pairs),
    ]
    header += ["pairs recalled (spread)", "per KiB touched"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    groups = defaultdict[tuple, list[Row]](list)
    for row in rows:
        groups[row["rule"], row["budget"]].append(row)
    recalled = {
        key: mean_and_spread([pairs_recalled(run, length) for run in runs])
        for key, runs in groups.items()
    }
    for name, budget in sorted(groups, key=lambda key: (key[1] or np.inf, -recalled[key][0])):
        runs, (mean, spread) = groups[name, budget], recalled[name, budget]
        first = runs[0]
        accuracies = [
            [c["accuracy"] for run in runs for c in run["cells"] if of == (c["pairs"], c["length"])]
            for of in [(count, length) for count in pairs]
        ]
        touched = [first["slot_bytes_touched"], first["bytes_touched"]]
        per = [f"{1024 * mean / size:.1f}" for size in touched]
        both = [", ".join(dict.fromkeys(map(str, x))) for x in (touched, per)]
        cells = [f"`{name}`", size(budget), str(first["state_bytes"]), both[0]]
        cells += [f"{np.mean(x):.2f}" if x else "" for x in accuracies]
        cells += [f"{mean:.1f} ({spread:.1f})", both[1]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sizes(row: Row) -> str:
    """The settings of a run of state tracking in a few words."""
    about = row["settings"]
    text = (
        f"{about['steps']} steps of {about['batch_size']} documents of {about['length']} tokens; "
        f"width {about['width']}, layers {about['layers']}, {about['heads']} heads of "
        f"{about['head_dim']}, rate {about['learning_rate']:g}"
    )
    text += ", start token" * about["start_token"] + ", convolution" * about["convolution"]
    if about["every_value"]:
        text += ", a label at every " + {"brackets": "bracket"}.get(row["group"], "number")
    steps = about["delta_steps"]
    return text + (f", {steps} steps of DeltaProduct per token" if steps != 2 else "")


def state_tracking_table(rows: Sequence[Row]) -> str:
    """Accuracy within the training length and in the last range, by task, as Markdown.

    The mean over seeds, in brackets the worst and, behind it, the number of seeds.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    ends = [(s["above"], s["up_to"]) for s in (rows[0]["spans"][0], rows[0]["spans"][-1])]
    header = [f"{group}, tokens {a + 1}-{b}" for group in groups for a, b in ends]
    lines = [f"| memory | bytes | {' | '.join(header)} |", "|---" * (len(header) + 2) + "|"]
    for name in names_in_order(rows):
        own = [row for row in rows if row["rule"] == name]
        cells = [f"`{name}`", str(own[0]["state_bytes"])]
        for group, index in itertools.product(groups, (0, -1)):
            shares = [row["spans"][index]["accuracy"] for row in own if row["group"] == group]
            shares = [share for share in shares if share is not None]
            seeds = f"{min(shares):.3f}, {len(shares)}" if shares else ""
            cells.append(f"{np.mean(shares):.3f} ({seeds})" if shares else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the pictures and prints the tables of the existing results."""
    options = parse(Options, argv, description=__doc__)
    if options.recall.exists():
        rows = json.loads(options.recall.read_text(encoding="utf-8"))["rows"]
        save_figure(recall_picture(rows), options.images / "comparison_recall.png")
        lengths = sorted({cell["length"] for row in rows for cell in row["cells"]})
        print(*(f"{n} tokens\n\n{recall_table(rows, n)}\n" for n in lengths), sep="\n")
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
