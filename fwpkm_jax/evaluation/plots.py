"""Pictures of results, one PNG each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

Record = Mapping[str, Any]

# Blue and orange that colour-blind readers tell apart (Okabe and Ito 2008), and greys.
_ON, _OFF, _GREY, _TEXT = "#0072B2", "#D55E00", "#8A8A8A", "#333333"
_DEPTH_BINS = 10
_TIMES = "\N{MULTIPLICATION SIGN}"
_FEWEST_ANSWERS = 20  # Ranges with fewer would show chance, not the model; the table has them.


def plot_recall(record: Record, directory: Path) -> list[Path]:
    """Accuracy by distance with the memory writing and disabled; the attention window marked."""
    results = record["results"]
    figure, axes = _figure(7.2, 4.2)
    edge = results["length"]
    window, reach = results["window"], results["reach"]
    for bound, label in ((window, "attention window"), (reach, "reach of all layers")):
        if bound:
            axes.axvspan(0, min(bound, edge), color=_GREY, alpha=0.13, lw=0)
            axes.annotate(
                f"{label}\n{bound} tokens", (min(bound, edge), 0.5), xytext=(-5, 0),
                textcoords="offset points", ha="right", va="center", rotation=90,
                color=_GREY, fontsize=8.5,
            )  # fmt: skip
    axes.axhline(results["chance"], color=_GREY, lw=1, ls=(0, (4, 3)))
    axes.text(edge / 100, results["chance"] + 0.01, f"chance {results['chance']:.3f}",
              color=_GREY, va="bottom", fontsize=8.5)  # fmt: skip
    for name, label, color in (
        ("writing", "memory writing", _ON),
        ("frozen", "writing disabled", _OFF),
    ):
        bins = [b for b in results[name]["by_distance"] if b["answers"] >= _FEWEST_ANSWERS]
        at = [(b["above"] + 1 + b["up_to"]) / 2 for b in bins]
        share = np.array([b["accuracy"] for b in bins])
        bounds = np.array([b["interval"] for b in bins]).reshape(-1, 2)
        axes.fill_between(at, bounds[:, 0], bounds[:, 1], color=color, alpha=0.18, lw=0)
        total = results[name]["all"]["accuracy"]
        axes.plot(at, share, color=color, marker="o", ms=4.5, lw=1.8, clip_on=False,
                  label=f"{label}: {total:.3f}")  # fmt: skip
    _legend(axes)
    axes.set(xlim=(0, edge), ylim=(-0.01, 1.02))
    axes.set_xlabel("distance from the stated fact to the answer (tokens)")
    axes.set_ylabel("answers right (share)")
    answers = results["writing"]["all"]["answers"]
    _title(axes, "Recall of stated facts by distance", f"{answers:,} answers, 95 % intervals")
    return [_save(figure, directory / "recall.png")]


def plot_perplexity(record: Record, directory: Path) -> list[Path]:
    """Loss along the first documents, and what writing changed since each one's start."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    curves = results["curves"]
    if not curves:
        return []
    both = len(passes) == 2
    figure = Figure(figsize=(10.5 if both else 7.2, 4.2), layout="constrained")
    axes = list(figure.subplots(1, 2 if both else 1, squeeze=False)[0])
    for name in passes:
        color, label = (_ON, "writing") if name == "writing" else (_OFF, "frozen memory")
        at, mean = _mean_curve(curves, name)
        axes[0].plot(at, mean, color=color, lw=1.8, label=label)
    _legend(axes[0])
    axes[0].set_xlabel("position in the document (tokens)")
    axes[0].set_ylabel("loss so far (nats per token)")
    counted = f"mean of {len(curves)} document" + ("s" if len(curves) > 1 else "")
    _style(axes[0])
    _thousands(axes[0].xaxis)
    _title(axes[0], "Loss from the document's start", counted)
    if both:
        for curve in curves:
            at = _positions(curve)
            difference = _running(curve, "writing") - _running(curve, "frozen")
            axes[1].plot(at, difference, color=_ON, alpha=0.35, lw=1)
        at, mean = _mean_curve(curves, "writing")
        _, frozen = _mean_curve(curves, "frozen")
        axes[1].plot(at, mean - frozen, color=_ON, lw=2.2)
        axes[1].axhline(0, color=_GREY, lw=1)
        axes[1].set_xlabel("position in the document (tokens)")
        axes[1].set_ylabel("writing minus frozen (nats per token)")
        _style(axes[1])
        _thousands(axes[1].xaxis)
        _title(axes[1], "What writing changes", "documents thin, their mean thick; below 0 helps")
    return [_save(figure, directory / "ppl.png")]


def plot_needle(record: Record, directory: Path) -> list[Path]:
    """Exact match by number of readings, and where in the haystack the answers were found."""
    runs = record["results"]["runs"]
    lengths = sorted({run["words"] for run in runs})
    figure = Figure(figsize=(10.5, max(3.6, 1.6 + 0.32 * len(runs))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    _bars(left, runs, lengths)
    _depths(figure, right, runs)
    return [_save(figure, directory / "needle.png")]


def _bars(axes: Axes, runs: list[Record], lengths: list[int]) -> None:
    shades = ("#9ECAE1", "#6BAED6", "#3182BD", "#08519C", "#08306B")
    readings = sorted({run["readings"] for run in runs})
    width = 0.8 / len(readings)
    for order, number in enumerate(readings):
        chosen = [run for run in runs if run["readings"] == number]
        at = [lengths.index(run["words"]) + (order - (len(readings) - 1) / 2) * width
              for run in chosen]  # fmt: skip
        share = np.array([run["exact"]["accuracy"] for run in chosen])
        bounds = np.array([run["exact"]["interval"] for run in chosen])
        axes.bar(
            at, share, width * 0.9, color=shades[min(order, 4)], label=str(number),
            yerr=np.abs(bounds.T - share).tolist(), error_kw={"lw": 1, "ecolor": _TEXT},
        )  # fmt: skip
    axes.set_xticks(range(len(lengths)), [f"{words:,}" for words in lengths])
    axes.set(ylim=(0, 1))
    axes.set_xlabel("haystack (words)")
    axes.set_ylabel("exact match (share)")
    _legend(axes, ncols=5, handlelength=0.9, columnspacing=0.9, title="readings")
    _style(axes)
    samples = max(run["exact"]["answers"] for run in runs)
    _title(axes, "Exact match", f"{samples} samples, 95 % intervals")


def _depths(figure: Figure, axes: Axes, runs: list[Record]) -> None:
    table = np.full((len(runs), _DEPTH_BINS), np.nan)
    for row, run in enumerate(runs):
        for depth in run["by_depth"]:
            table[row, round(depth["from"] * _DEPTH_BINS / 100)] = depth["accuracy"]
    image = axes.imshow(table, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_facecolor("#EEEEEE")  # No sample at this depth.
    for (row, column), share in np.ndenumerate(table):
        if not np.isnan(share):
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7.5,
                      color="white" if share > 0.6 else _TEXT)  # fmt: skip
    axes.set_yticks(
        range(len(runs)), [f"{run['words']:,} {_TIMES} {run['readings']}" for run in runs]
    )
    axes.set_xticks(np.arange(_DEPTH_BINS + 1) - 0.5, [str(10 * n) for n in range(11)])
    axes.set_xlabel("depth of the needle (% of the haystack)")
    axes.set_ylabel(f"haystack words {_TIMES} readings")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8.5, colors=_TEXT)
    lengths = [run["words"] for run in runs]
    for row in range(1, len(runs)):
        if lengths[row] != lengths[row - 1]:
            axes.axhline(row - 0.5, color="white", lw=4)
    gaps = "grey: no sample" if np.isnan(table).any() else "share of each tenth"
    _title(axes, "Exact match by depth", gaps)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0, labelsize=8.5, colors=_TEXT)


def _positions(curve: Record) -> np.ndarray:
    """End of every run of tokens, the last one cut off by the end of the document."""
    ends = curve["run"] * np.arange(1, -(-curve["tokens"] // curve["run"]) + 1)
    return np.minimum(ends, curve["tokens"])


def _running(curve: Record, name: str) -> np.ndarray:
    """Mean loss from the document's start to the end of every run."""
    ends = _positions(curve)
    sizes = np.diff(ends, prepend=0)
    return np.cumsum(np.array(curve[name]) * sizes) / ends


def _mean_curve(curves: list[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The running loss averaged over documents, as far as all of them go."""
    shortest = min(len(curve[name]) for curve in curves)
    longest = max(curves, key=lambda curve: curve["tokens"])
    running = np.mean([_running(curve, name)[:shortest] for curve in curves], axis=0)
    return _positions(longest)[:shortest], running


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    _style(axes)
    return figure, axes


def _legend(axes: Axes, **options: Any) -> None:
    """A legend above the axes on the right, where no curve can run through it."""
    legend = axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.99), borderaxespad=0, frameon=False,
        fontsize=9, title_fontsize=9,
        **({"ncols": 2, "handlelength": 1.2, "columnspacing": 1.2} | options),
    )  # fmt: skip
    for entry, handle in zip(legend.get_texts(), legend.get_lines(), strict=False):  # Not bars.
        entry.set(color=handle.get_color(), weight="bold")


def _thousands(axis: Axis) -> None:
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value else "0")


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_TEXT, labelsize=9)
    axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    axes.set_axisbelow(True)


def _title(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", weight="bold", fontsize=11, pad=20)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=_GREY, fontsize=9)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
