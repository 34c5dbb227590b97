"""How the pictures of the pages look: readable at 400 pixels, on a light and on a dark page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

BLUE, ORANGE, GREY, INK = "#1f6fb4", "#d9730d", "#8a8f98", "#22262b"
WIDTH = 5.6
"""Inches; 560 pixels on a screen."""


def new_figure(height: float, *, columns: int = 1) -> tuple[Figure, Sequence[Axes]]:
    """A figure of one row of axes with a white ground."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GREY)
        axis.tick_params(colors=INK, labelsize=10.5, length=3)
        axis.grid(axis="x", color="#e3e6ea", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes


def label(axis: Axes, *, x: str = "", y: str = "") -> None:
    """Names the axes."""
    axis.set_xlabel(x, fontsize=10.5, color=INK)
    axis.set_ylabel(y, fontsize=10.5, color=INK)


def rows(
    axis: Axes,
    names: Sequence[str],
    values: Sequence[Sequence[float] | np.ndarray],
    *,
    color: str = BLUE,
    hollow: bool = False,
    offset: float = 0.0,
    name: str | None = None,
) -> None:
    """A row for each name from the top, with a point for each value."""
    points = [(one, at + offset) for at, each in enumerate(values) for one in each]
    style = {"facecolors": "white"} if hollow else {}
    if points:
        axis.scatter(*zip(*points, strict=True), s=34, color=color, zorder=3, label=name, **style)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)


def legend(figure: Figure, axis: Axes, *, columns: int = 2) -> None:
    """The names of points above the axes."""
    handles, names = axis.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=10.5
    )


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG of twice the pixels of the screen, in 64 colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    figure.savefig(file, dpi=200)
    # Without dithering, which would speckle the ground.
    few = Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
