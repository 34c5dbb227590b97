"""The table, the plots and the finding of needle results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table, share
from fwpkm_jax.evaluation.needle.scores import DEPTH_BINS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = ("#C6DBEF", "#9ECAE1", "#4292C6", "#08519C")


def table(record: Record) -> str:
    """A table of exact, digit and candidate match by haystack length and number of readings."""
    config, provenance = record["config"], record["provenance"]
    resets = {"never": "never reset", "sample": "reset between samples"}
    memory = resets.get(provenance["resets"]["memory"], "reset at every reading")
    rows = [
        [
            f"{run['words']:,}",
            f"{run['token_length']['mean']:,.0f}",
            str(run["yarn_factor"] or "-"),
            str(run["readings"]),
            str(run["exact"]["answers"]),
            share(run["exact"]),
            f"{run['digits']:.2f}",
            f"{run['candidate']['accuracy']:.3f}",
        ]
        for run in record["results"]["runs"]
    ]
    header = ["words", "tokens", "YaRN", "readings", "samples", "exact match"]
    digits = len(record["results"]["runs"][0]["samples"][0]["expected"])
    header += [f"digits of {digits}", "any needle"]
    title = f"Needle in a haystack (mode {config['mode']}, memory {memory}"
    title += ")" if config["write"] else ", writing disabled)"
    return f"{title}\n{format_table(header, rows)}\ntokens per write: {provenance['chunk_size']}"


def finding(record: Record) -> str:
    """Share of exact answers after the fewest and the most readings, for each length."""
    lengths: dict[int, dict[int, float]] = {}
    for run in record["results"]["runs"]:
        lengths.setdefault(run["words"], {})[run["readings"]] = run["exact"]["accuracy"]
    texts = []
    for words, shares in lengths.items():
        first, last = min(shares), max(shares)
        text = f"of haystacks of {words:,} words {shares[first]:.1%} were answered right after "
        text += f"{first} reading" + ("s" if first > 1 else "")
        texts.append(text + (f" and {shares[last]:.1%} after {last}" if last > first else ""))
    text = "; ".join(texts)
    return text[0].upper() + text[1:] + "."


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots exact match by length, readings and samples so far, and by the needle's depth."""
    runs = record["results"]["runs"]
    lengths = sorted({run["words"] for run in runs})
    figure = style.blank_figure(10.5, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _stacked_bars(
        left, {f"{words:,}": [r for r in runs if r["words"] == words] for words in lengths}
    )
    samples = max(run["exact"]["answers"] for run in runs)
    told = f"{samples} samples; intervals in the table"
    style.finish(left, "Exact match", told, xlabel="haystack (words)", ylabel="exact match (share)")
    _progress(right, runs)
    bars = style.save_figure(figure, directory / "needle.png")
    return [bars, _save_depths(runs, lengths, directory / "needle_depth.png")]


def _stacked_bars(axes: "Axes", bars: Mapping[str, Sequence[Record]]) -> None:
    """Draws a bar for each name; its levels are the shares after each number of readings.

    Args:
      bars: rows of `results.runs` of one model and length, by the bar's label.
    """
    readings = sorted({run["readings"] for runs in bars.values() for run in runs})
    colors = {n: _shade(order, len(readings)) for order, n in enumerate(readings)}
    shown = set()
    for place, runs in enumerate(bars.values()):
        # The tallest bar first, so that every level stays visible.
        for run in sorted(runs, key=lambda run: (-run["exact"]["accuracy"], run["readings"])):
            number, right = run["readings"], run["exact"]["accuracy"]
            label = None if number in shown else str(number)
            shown.add(number)
            axes.bar(place, right, 0.62, color=colors[number], label=label)
            axes.plot([place - 0.31, place + 0.31], [right, right], color="white", lw=1.2)
        best = max(run["exact"]["accuracy"] for run in runs)
        axes.annotate(
            f"{best:.2f}", (place, best), xytext=(0, 3), textcoords="offset points",
            ha="center", color=style.TEXT, fontsize=8.5,
        )  # fmt: skip
    axes.set_xticks(range(len(bars)), list(bars))
    axes.set(ylim=(0, 1.06), xlim=(-0.6, len(bars) - 0.4))
    handles, labels = axes.get_legend_handles_labels()
    order = np.argsort([int(label) for label in labels])
    style.add_legend(
        axes, handles=[handles[i] for i in order], labels=[labels[i] for i in order],
        ncols=5, handlelength=0.9, columnspacing=0.9, title="readings",
    )  # fmt: skip


def _progress(axes: "Axes", runs: Sequence[Record]) -> None:
    """Right answers against samples seen: a bend shows that earlier samples help or disturb."""
    readings = sorted({run["readings"] for run in runs})
    lengths = sorted({run["words"] for run in runs})
    styles = ("-", "--", ":", "-.", (0, (1, 3)))
    for run in runs:
        color = style.COLORS[readings.index(run["readings"]) % len(style.COLORS)]
        label = str(run["readings"]) if run["words"] == lengths[0] else None
        right = [0, *run["progress"]]
        axes.plot(range(len(right)), right, color=color, lw=1.6, label=label,
                  ls=styles[lengths.index(run["words"]) % len(styles)])  # fmt: skip
    most = max(len(run["progress"]) for run in runs)
    axes.plot([0, most], [0, most], color="#CCCCCC", lw=1, zorder=0)
    axes.set(xlim=(0, most), ylim=(0, None))
    style.add_legend(axes, ncols=5, title="readings")
    names = ("solid", "dashed", "dotted", "dash-dotted", "sparse dots")
    which = ", ".join(f"{n}: {words:,}" for n, words in zip(names, lengths, strict=False))
    which = f"; {which} words" if len(lengths) > 1 else ""
    style.finish(
        axes,
        "Along the samples",
        f"grey: all right{which}",
        xlabel="samples so far",
        ylabel="exact matches so far",
    )


def _save_depths(runs: Sequence[Record], lengths: list[int], path: Path) -> Path:
    """Draws a heat map of exact match by depth and length for each number of readings."""
    readings = sorted({run["readings"] for run in runs})
    width = 0.75 * len(lengths) + 1.0
    figure = style.blank_figure(max(3.9, 1.6 + width * len(readings)), 3.9)
    panels = list(figure.subplots(1, len(readings), squeeze=False, sharey=True)[0])
    image = None
    for axes, number in zip(panels, readings, strict=True):
        cells = np.full((DEPTH_BINS, len(lengths)), np.nan)
        for run in runs:
            for depth in run["by_depth"] if run["readings"] == number else ():
                row = round(depth["from"] * DEPTH_BINS / 100)
                cells[row, lengths.index(run["words"])] = depth["accuracy"]
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axes.set_facecolor("#EEEEEE")  # No sample at this depth.
        for (row, column), right in np.ndenumerate(cells):
            if not np.isnan(right):
                axes.text(column, row, f"{right:.2f}", ha="center", va="center", fontsize=7.5,
                          color="white" if right > 0.6 else style.TEXT)  # fmt: skip
        short = [f"{words}" if words < 1000 else f"{words / 1000:g}K" for words in lengths]
        axes.set_xticks(range(len(lengths)), short)
        axes.set_yticks(np.arange(DEPTH_BINS + 1) - 0.5, [str(10 * n) for n in range(11)])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=8.5, colors=style.TEXT)
        axes.set_title(f"{number} reading" + "s" * (number > 1), fontsize=9.5, color=style.TEXT)
    panels[0].set_ylabel("depth of the needle (% of the haystack)")
    figure.supxlabel("haystack (words)", fontsize=10)
    figure.suptitle("Exact match by depth (grey: none)", x=0.01, ha="left", fontsize=11,
                    weight="bold")  # fmt: skip
    assert image is not None, "a result has at least one run"
    bar = figure.colorbar(image, ax=panels, fraction=0.04, pad=0.02)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    bar.ax.tick_params(length=0, labelsize=8.5, colors=style.TEXT)
    return style.save_figure(figure, path)


def _shade(order: int, number: int) -> str:
    """The colour of a number of readings; more readings are darker."""
    return _SHADES[round(order * (len(_SHADES) - 1) / (number - 1)) if number > 1 else 2]
