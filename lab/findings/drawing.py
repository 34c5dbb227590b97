"""How the pictures of the pages look: readable at 400 pixels, on a light and on a dark page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREY, INK = "#1f6fb4", "#d9730d", "#8a8f98", "#22262b"
GREEN, VIOLET, GRID, GROUND = "#2a9d8f", "#7a5195", "#e3e6ea", "#ffffff"
ON_DARK = {
    **{BLUE: "#5bb4e8", ORANGE: "#f0a04b", GREY: "#a9b2bc", INK: "#e6e8ea"},
    **{GREEN: "#5fd0c0", VIOLET: "#c3a0e8", GRID: "#3a4149", GROUND: "#1c2026"},
    "#000000": "#e6e8ea",  # What a plot does not colour.
}
"""What each colour becomes where the reader's system is set to dark."""
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
        axis.grid(axis="x", color=GRID, linewidth=0.8)
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
    """Writes an SVG with both sets of colours; equal figures give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    path.write_text(in_both_themes(file.getvalue()), encoding="utf-8")


def in_both_themes(picture: str) -> str:
    """An SVG whose colours follow the reader's system.

    Raises:
      ValueError: it has a colour that `ON_DARK` does not have.
    """
    found = set(re.findall(r"#[0-9a-f]{6}\b", picture))
    if unknown := found - ON_DARK.keys():
        raise ValueError(f"{sorted(unknown)} have no colour for a dark page; add one to ON_DARK.")
    light, dark = (
        "".join(f"--{name[1:]}: {shown}; " for name, shown in colors.items() if name in found)
        for colors in (dict(zip(ON_DARK, ON_DARK, strict=True)), ON_DARK)
    )
    # Text without a colour of its own is black in an SVG.
    style = f"<style>svg {{ {light}fill: var(--{INK[1:]}); }}\n"
    style += f"@media (prefers-color-scheme: dark) {{ svg {{ {dark}}} }}</style>\n"
    themed = re.sub(r"#([0-9a-f]{6})\b", r"var(--\1)", picture)
    head, rest = themed.split("<defs>", 1)
    return "\n".join(line.rstrip() for line in f"{head}{style}<defs>{rest}".splitlines()) + "\n"
