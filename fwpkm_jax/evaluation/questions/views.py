"""The table, the plot and the finding of results that `ask` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display.plot_style import (
    BLUE,
    ORANGE,
    add_legend,
    new_figure,
    save_figure,
    set_title,
)
from fwpkm_jax.evaluation.display.tables import PASSES, Record, format_table

_COLORS = {"writing": BLUE, "frozen": ORANGE}


def table(record: Record) -> str:
    """Mean scores in percent by task, length and pass, with 95 % intervals."""
    runs = record["results"]["runs"]
    passes = [name for name in PASSES if name in runs[0]]
    rows = []
    for run in runs:
        row = [run["task"], "-" if run["length"] is None else f"{run['length']:,}"]
        row += [str(run["questions"]), f"{run['tokens']['mean']:,.0f}"]
        row += [_percent(run[name]) for name in passes]
        rows.append(row + ([_percent(run["difference"], sign="+")] if "difference" in run else []))
    header = ["task", "length", "questions", "tokens", *(PASSES[name] for name in passes)]
    header += ["difference"] if len(passes) == 2 else []
    memory = {"text": "reset at every text", "never": "kept within a task"}
    return (
        f"scores in percent, 95 % intervals; memory {memory[record['config']['memory_reset']]}\n"
        f"{format_table(header, rows)}\ntokens per write: {record['provenance']['chunk_size']}"
    )


def finding(record: Record) -> str:
    """The mean score over all rows in each pass."""
    runs = record["results"]["runs"]
    passes = [name for name in PASSES if name in runs[0]]
    means = [
        f"{100 * sum(run[name]['score'] for run in runs) / len(runs):.1f} with {PASSES[name]}"
        for name in passes
    ]
    tasks, lengths = (len({run[key] for run in runs}) for key in ("task", "length"))
    many = f" at {lengths} lengths" if lengths > 1 else ""
    return (
        f"The mean score over {tasks} task{'s' * (tasks > 1)}{many} is "
        f"{' and '.join(means)}, of 100."
    )


def plot_of(name: str, title: str) -> Any:
    """A function that draws the scores of an evaluation as bars into `NAME.png`."""

    def plot(record: Record, directory: Path) -> list[Path]:
        runs = record["results"]["runs"]
        passes = [one for one in PASSES if one in runs[0]]
        figure, axes = new_figure(max(4.2, 1.4 + 0.62 * len(runs)), 4.4)
        width = 0.8 / len(passes)
        for number, one in enumerate(passes):
            at = [place + (number - (len(passes) - 1) / 2) * width for place in range(len(runs))]
            axes.bar(
                at,
                [100 * run[one]["score"] for run in runs],
                width,
                color=_COLORS[one],
                label=PASSES[one],
            )
        labels = [
            run["task"] + ("" if run["length"] is None else f"\n{run['length']:,}") for run in runs
        ]
        axes.set_xticks(range(len(runs)), labels, rotation=60, ha="right", fontsize=8)
        axes.set(ylim=(0, 104))
        axes.set_ylabel("score (percent)")
        add_legend(axes)
        questions = sum(run["questions"] for run in runs)
        set_title(axes, title, f"{questions:,} questions; intervals in the table")
        return [save_figure(figure, directory / f"{name}.png")]

    return plot


def _percent(score: Record, *, sign: str = "") -> str:
    text = f"{100 * score['score']:{sign}.1f}"
    if score["interval"] is None:
        return text
    low, high = score["interval"]
    return f"{text} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"
