"""The common style of all plots: colours, axes, titles, legends.

matplotlib (extra `plots`) is imported when a plot is drawn.
"""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fwpkm_jax.io.atomic import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

DPI = 150
# Blue and orange that colour-blind readers tell apart (Okabe and Ito 2008), and greys.
BLUE, ORANGE, GREY, TEXT = "#0072B2", "#D55E00", "#8A8A8A", "#333333"
# More of the same set, for lines that stand for different things.
COLORS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", GREY)


def drawn(plot: Callable[..., list[Path]], *arguments: Any) -> list[Path]:
    """The files that `plot` writes; none, and one warning, where matplotlib is not installed."""
    try:
        return plot(*arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        _say_that_nothing_is_drawn()
        return []


@cache  # Once in a program, not for each plot.
def _say_that_nothing_is_drawn() -> None:
    logger.warning("No plots: matplotlib is not installed; run: pip install -e '.[plots]'")


def blank_figure(width: float, height: float) -> "Figure":
    """A figure without axes, `width` by `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """A figure of one pair of axes, `width` by `height` inches."""
    figure = blank_figure(width, height)
    return figure, figure.subplots()


def add_legend(axes: "Axes", **options: Any) -> None:
    """Adds a legend above the axes on the right, where no curve crosses it."""
    legend = axes.legend(
        loc="lower right", bbox_to_anchor=(1.01, 0.99), borderaxespad=0, frameon=False,
        fontsize=9, title_fontsize=9,
        **({"ncols": 2, "handlelength": 1.2, "columnspacing": 1.2} | options),
    )  # fmt: skip
    for entry, handle in zip(legend.get_texts(), legend.get_lines(), strict=False):  # Not bars.
        entry.set(color=handle.get_color(), weight="bold")


def count_in_thousands(axis: "Axis") -> None:
    """Labels ticks in thousands, such as 4K."""
    axis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value else "0")


def style_axes(axes: "Axes") -> None:
    """Gives the axes two thin spines and a faint horizontal grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.grid(axis="y", color="#E6E6E6", lw=0.8)
    axes.set_axisbelow(True)


def set_title(axes: "Axes", title: str, subtitle: str) -> None:
    """Sets a bold title on the left and a grey line of text below it."""
    axes.set_title(title, loc="left", weight="bold", fontsize=11, pad=20)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, color=GREY, fontsize=9)


def finish(axes: "Axes", title: str, subtitle: str, **properties: Any) -> None:
    """Styles axes on which all is drawn, and sets what `Axes.set` takes, such as labels."""
    axes.set(**properties)
    style_axes(axes)
    set_title(axes, title, subtitle)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Writes the figure, creates its directory if needed, and returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=DPI, format=path.suffix.removeprefix(".") or "png")
    return path
