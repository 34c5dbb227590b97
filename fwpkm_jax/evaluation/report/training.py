"""Training curves of a run, from its `metrics.jsonl`."""

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.io.untrusted import OutsideFileError, bounded_lines, open_file, parse_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (4.3, 3.3)  # Inches; two pictures fit beside each other next to the text.
_POINTS = 200  # Most points of a curve; longer runs are averaged over equal ranges of steps.


class Curve(NamedTuple):
    """A metric by training step; `steps` and `values` have one entry per record of the metric."""

    steps: np.ndarray
    values: np.ndarray


def read_metrics(path: Path) -> dict[str, Curve]:
    """Every metric of a `metrics.jsonl`, by name; empty if there is no such file.

    Values that were not finite are left out, and so are an incomplete last line and whatever is no
    record of numbers.
    """
    measures: dict[str, tuple[list[int], list[float]]] = {}
    with contextlib.ExitStack() as opened:
        lines = opened.enter_context(open_file(path)) if path.is_file() else io.BytesIO()
        for line in bounded_lines(lines, path):
            try:
                record = parse_json(line, path, kind=dict)
            except OutsideFileError:
                continue
            step = record.pop("step", None)
            for name, value in record.items():
                if _is_number(value) and type(step) is int and 0 <= step < 2**53:
                    steps, values = measures.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
    return {name: Curve(np.array(s), np.array(v)) for name, (s, v) in measures.items()}


def _is_number(value: object) -> bool:
    """Whether a value is one that was measured; null is one that was not finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def plot_training(metrics: dict[str, Curve], directory: Path) -> list[Path]:
    """Plots the loss, the memories' error and their use, as far as they were measured."""
    if "loss" not in metrics:
        return []
    layers = sorted(
        (name.split("/")[0] for name in metrics if name.endswith("/memory_loss")),
        key=lambda name: (len(name), name),  # layer_2 before layer_10.
    )
    figure, axes = style.new_figure(*_SIZE)
    _plot_loss(axes, metrics)
    paths = [style.save_figure(figure, directory / "training_loss.png")]
    if not layers:
        return paths
    figure, axes = style.new_figure(*_SIZE)
    for color, layer in zip(style.COLORS * len(layers), layers, strict=False):
        _line(axes, metrics[f"{layer}/memory_loss"], color, layer)
    _finish(axes, "mean squared error", "What the memory got wrong")
    paths.append(style.save_figure(figure, directory / "training_memory_loss.png"))
    figure, axes = style.new_figure(*_SIZE)
    shades = {"gate_mean": style.BLUE, "coverage": style.ORANGE, "collision": style.GREY}
    for name, color in shades.items():
        curves = [metrics[f"{n}/{name}"] for n in layers if f"{n}/{name}" in metrics]
        for number, curve in enumerate(curves):
            label = name.replace("_mean", "") if number == 0 else None
            _line(axes, curve, color, label)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, "share", "Use of the memory")
    return [*paths, style.save_figure(figure, directory / "training_use.png")]


def describe_training(metrics: dict[str, Curve]) -> str:
    """Two sentences about the training and validation loss."""
    if "loss" not in metrics:
        return "This run has no metrics.jsonl, so its training curves are unknown."
    steps, losses = metrics["loss"]
    stretch = max(1, len(losses) // 20)
    first, last = np.mean(losses[:stretch]), np.mean(losses[-stretch:])
    text = (
        f"Over {steps[-1]:,} steps the training loss went from {first:.3f} to {last:.3f} nats per "
        f"predicted token (means of the first and the last {stretch} steps). "
    )
    if "valid/loss" not in metrics:
        return text + "Nothing was held out for validation."
    value = metrics["valid/loss"].values[-1]
    text += f"On held-out data it was {value:.3f} at the end"
    if "valid/answer_accuracy" in metrics:
        accuracy = metrics["valid/answer_accuracy"].values[-1]
        text += f", with {accuracy:.1%} of the answers right"
    return text + "."


def describe_memory_curves(metrics: dict[str, Curve]) -> str:
    """How to read the curves of the memory; empty without a memory."""
    if not any(name.endswith("/memory_loss") for name in metrics):
        return ""
    return (
        "The second picture is the memory's own error: the squared difference between what a token "
        "read and what it should have read, before each write. The model also changes what it asks "
        "the memory to predict, so the curve need not fall. The third picture shows how much of "
        "the memory's answer the tokens took (gate), the share of its slots that were read "
        "(coverage) and the share of reads whose slot was read more than once (collision)."
    )


def _plot_loss(axes: "Axes", metrics: dict[str, Curve]) -> None:
    _line(axes, metrics["loss"], style.BLUE, "training")
    if "valid/loss" in metrics:
        steps, losses = metrics["valid/loss"]
        axes.plot(
            steps, losses, color=style.ORANGE, marker="o", ms=4, lw=1.2, label="held-out data"
        )
    _finish(axes, "nats per token", "Loss")


def _line(axes: "Axes", curve: Curve, color: str, label: str | None) -> None:
    stretch = -(-len(curve.steps) // _POINTS)
    cuts = range(0, len(curve.steps), stretch)
    steps, values = (
        [np.mean(part[cut : cut + stretch]) for cut in cuts] for part in (curve.steps, curve.values)
    )
    axes.plot(steps, values, color=color, lw=1.6, label=label)


def _finish(axes: "Axes", label: str, title: str) -> None:
    style.finish(axes, title, "", xlabel="training step", ylabel=label)
    if axes.get_xlim()[1] > 5000:
        style.count_in_thousands(axes.xaxis)
    style.add_legend(axes, ncols=4)
