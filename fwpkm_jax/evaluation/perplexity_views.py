"""The table, the plot and the finding of streaming perplexity."""

from pathlib import Path

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table, signed

_PASSES = {"writing": "writing", "frozen": "frozen memory"}


def table(record: Record) -> str:
    """Tables of perplexity by data set and pass, and of the use of the memory by layer."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    first = results[passes[0]]
    difference = results.get("difference")
    header = ["data", "tokens", *(f"perplexity, {_PASSES[name]}" for name in passes)]
    header += ["loss difference (95 %)"] if difference else []
    names = [*first["by_source"], "all"]
    rows = []
    for name in names if len(names) > 2 else names[:1]:
        row = [name, f"{_pick(first, name)['tokens']:,}"]
        row += [f"{_pick(results[p], name)['perplexity']:.4f}" for p in passes]
        if difference:
            row.append(signed(_pick(difference, name)))
        rows.append(row)
    text = "Streaming perplexity\n" + format_table(header, rows)
    layers = _layer_rows(first)
    if layers:
        header = ["memory", "gate", "collision", "coverage", "kld", "windows"]
        text += f"\n\nUse of the memory, {_PASSES[passes[0]]}\n" + format_table(header, layers)
    return text


def finding(record: Record) -> str:
    """Perplexity of each pass, and what writing changed."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    scores = {name: results[name]["all"] for name in passes}
    named = {"writing": "with the memory writing", "frozen": "with the memory frozen"}
    text = " and ".join(f"{scores[name]['perplexity']:.3f} {named[name]}" for name in passes)
    text = f"Over {scores[passes[0]]['tokens']:,} tokens the perplexity was {text}"
    difference = results.get("difference")
    if not difference:
        return text + "."
    loss, interval = difference["all"]["loss"], difference["all"]["interval"]
    text += f": writing {'lowered' if loss < 0 else 'raised'} the loss by {abs(loss):.4f} nats"
    if interval is None:
        return text + "."
    text += f" (the change lies in [{interval[0]:+.4f}, {interval[1]:+.4f}] at 95 %)."
    if interval[0] <= 0 <= interval[1]:
        text += " That interval contains 0: on this much text no effect is certain."
    return text


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots the loss along the first documents, and how writing changed it since their start."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    curves = results["curves"]
    if not curves:
        return []
    both = len(passes) == 2
    figure = style.blank_figure(10.5 if both else 7.2, 4.2)
    axes = list(figure.subplots(1, 2 if both else 1, squeeze=False)[0])
    for name in passes:
        color, label = (
            (style.BLUE, "writing") if name == "writing" else (style.ORANGE, "frozen memory")
        )
        at, mean = _mean_curve(curves, name)
        axes[0].plot(at, mean, color=color, lw=1.8, label=label)
    style.add_legend(axes[0])
    counted = f"mean of {len(curves)} document" + ("s" if len(curves) > 1 else "")
    place = "position in the document (tokens)"
    style.finish(
        axes[0],
        "Loss from the document's start",
        counted,
        xlabel=place,
        ylabel="loss so far (nats per token)",
    )
    if both:
        for curve in curves:
            at = _positions(curve)
            difference = _running(curve, "writing") - _running(curve, "frozen")
            axes[1].plot(at, difference, color=style.BLUE, alpha=0.35, lw=1)
        at, mean = _mean_curve(curves, "writing")
        _, frozen = _mean_curve(curves, "frozen")
        axes[1].plot(at, mean - frozen, color=style.BLUE, lw=2.2)
        axes[1].axhline(0, color=style.GREY, lw=1)
        style.finish(
            axes[1],
            "What writing changes",
            "documents thin, their mean thick; below 0 helps",
            xlabel=place,
            ylabel="writing minus frozen (nats per token)",
        )
    for one in axes:
        style.count_in_thousands(one.xaxis)
    return [style.save_figure(figure, directory / "ppl.png")]


def _pick(scores: Record, name: str) -> Record:
    return scores["all"] if name == "all" else scores["by_source"][name]


def _layer_rows(scores: Record) -> list[list[str]]:
    rows = []
    for layer, gate in scores["gate_mean"].items():
        measures = scores["addressing"].get(layer)
        values = ["-"] * 3
        if measures:
            values = [f"{measures[name]:.4f}" for name in ("collision", "coverage", "kld")]
        rows.append([layer, f"{gate:.4f}", *values, str(measures["windows"] if measures else 0)])
    if len(rows) > 1 and (mean := scores["addressing"].get("mean")):
        gate = sum(scores["gate_mean"].values()) / len(rows)
        values = [f"{mean[name]:.4f}" for name in ("collision", "coverage", "kld")]
        rows.append(["mean", f"{gate:.4f}", *values, ""])
    return rows


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
