"""Plots of results, one PNG file each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fwpkm_jax.evaluation.display.plot_style import (
    BLUE,
    GREY,
    ORANGE,
    add_legend,
    count_in_thousands,
    new_figure,
    save_figure,
    set_title,
    style_axes,
)
from fwpkm_jax.evaluation.display.tables import Record

_DEPTH_BINS = 10
_TIMES = "\N{MULTIPLICATION SIGN}"
_FEWEST_ANSWERS = 20  # Ranges with fewer would show chance, not the model; the table has them.


def plot_recall(record: Record, directory: Path) -> list[Path]:
    """Plots accuracy by distance with writing enabled and disabled; marks the attention window."""
    results = record["results"]
    figure, axes = new_figure(7.2, 4.2)
    edge = results["length"]
    window, reach = results["window"], results["reach"]
    for bound, label in ((window, "attention window"), (reach, "reach of all layers")):
        if bound:
            axes.axvspan(0, min(bound, edge), color=GREY, alpha=0.13, lw=0)
            axes.annotate(
                f"{label}\n{bound} tokens", (min(bound, edge), 0.5), xytext=(-5, 0),
                textcoords="offset points", ha="right", va="center", rotation=90,
                color=GREY, fontsize=8.5,
            )  # fmt: skip
    axes.axhline(results["chance"], color=GREY, lw=1, ls=(0, (4, 3)))
    axes.text(edge / 100, results["chance"] + 0.01, f"chance {results['chance']:.3f}",
              color=GREY, va="bottom", fontsize=8.5)  # fmt: skip
    for name, label, color in (
        ("writing", "memory writing", BLUE),
        ("frozen", "writing disabled", ORANGE),
    ):
        bins = [b for b in results[name]["by_distance"] if b["answers"] >= _FEWEST_ANSWERS]
        at = [(b["above"] + 1 + b["up_to"]) / 2 for b in bins]
        share = np.array([b["accuracy"] for b in bins])
        bounds = np.array([b["interval"] for b in bins]).reshape(-1, 2)
        axes.fill_between(at, bounds[:, 0], bounds[:, 1], color=color, alpha=0.18, lw=0)
        total = results[name]["all"]["accuracy"]
        axes.plot(at, share, color=color, marker="o", ms=4.5, lw=1.8, clip_on=False,
                  label=f"{label}: {total:.3f}")  # fmt: skip
    add_legend(axes)
    axes.set(xlim=(0, edge), ylim=(-0.01, 1.02))
    axes.set_xlabel("distance from the stated fact to the answer (tokens)")
    axes.set_ylabel("answers right (share)")
    answers = results["writing"]["all"]["answers"]
    set_title(axes, "Recall of stated facts by distance", f"{answers:,} answers, 95 % intervals")
    return [save_figure(figure, directory / "recall.png")]


def plot_perplexity(record: Record, directory: Path) -> list[Path]:
    """Plots the loss along the first documents, and how writing changed it since their start."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    curves = results["curves"]
    if not curves:
        return []
    both = len(passes) == 2
    figure = Figure(figsize=(10.5 if both else 7.2, 4.2), layout="constrained")
    axes = list(figure.subplots(1, 2 if both else 1, squeeze=False)[0])
    for name in passes:
        color, label = (BLUE, "writing") if name == "writing" else (ORANGE, "frozen memory")
        at, mean = _mean_curve(curves, name)
        axes[0].plot(at, mean, color=color, lw=1.8, label=label)
    add_legend(axes[0])
    axes[0].set_xlabel("position in the document (tokens)")
    axes[0].set_ylabel("loss so far (nats per token)")
    counted = f"mean of {len(curves)} document" + ("s" if len(curves) > 1 else "")
    style_axes(axes[0])
    count_in_thousands(axes[0].xaxis)
    set_title(axes[0], "Loss from the document's start", counted)
    if both:
        for curve in curves:
            at = _positions(curve)
            difference = _running(curve, "writing") - _running(curve, "frozen")
            axes[1].plot(at, difference, color=BLUE, alpha=0.35, lw=1)
        at, mean = _mean_curve(curves, "writing")
        _, frozen = _mean_curve(curves, "frozen")
        axes[1].plot(at, mean - frozen, color=BLUE, lw=2.2)
        axes[1].axhline(0, color=GREY, lw=1)
        axes[1].set_xlabel("position in the document (tokens)")
        axes[1].set_ylabel("writing minus frozen (nats per token)")
        style_axes(axes[1])
        count_in_thousands(axes[1].xaxis)
        set_title(
            axes[1], "What writing changes", "documents thin, their mean thick; below 0 helps"
        )
    return [save_figure(figure, directory / "ppl.png")]


def _positions(curve: Record) -> np.ndarray:
    """Position where each point's tokens end; the last one is the end of the document."""
    points = -(-curve["tokens"] // curve["run"])
    held = max((len(x) for x in curve.values() if isinstance(x, list)), default=0)
    if points > held:
        raise ValueError(f"a curve of {points} points holds {held} values.")
    ends = curve["run"] * np.arange(1, points + 1)
    return np.minimum(ends, curve["tokens"])


def _running(curve: Record, name: str) -> np.ndarray:
    """Mean loss from the document's start to each of `_positions`."""
    ends = _positions(curve)
    sizes = np.diff(ends, prepend=0)
    return np.cumsum(np.array(curve[name]) * sizes) / ends


def _mean_curve(curves: list[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The running loss averaged over documents, up to the end of the shortest one."""
    shortest = min(len(curve[name]) for curve in curves)
    longest = max(curves, key=lambda curve: curve["tokens"])
    running = np.mean([_running(curve, name)[:shortest] for curve in curves], axis=0)
    return _positions(longest)[:shortest], running
