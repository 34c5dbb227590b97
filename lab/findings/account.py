"""Where does a training step's time go on an H100? By class of launches, modelled and measured."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.stored import document_of

MODEL, FILE = "gdn__fwpkm2_6_10", "compiled_h100/account_h100.json"
PARTS = {
    "products": ("products", "memories: products"),
    "gated delta rule": ("kernels of the gated delta rule", "around the rule"),
    "memories": ("memories: kernels", "memories: elementwise", "memories: sort, grouping"),
    "norms": ("RMS norms and residual", "gated norm"),
    "SwiGLU": ("SwiGLU",),
    "short convolution": ("short convolution, SiLU, L2 norm",),
    "head and loss": ("head and loss, elementwise",),
    "optimiser": ("optimiser",),
}
"""Rows of the picture, each with its classes of the account; a last row has what is left."""


def milliseconds() -> dict[str, tuple[float, float]]:
    """Of each part of the step with three memories: by the cost model, and measured."""
    rows: list[dict[str, Any]] = document_of(FILE)["models"][MODEL]["rows"]
    times = {row["class"]: (row["h100_ms"], row["measured_ms"]) for row in rows}

    def total(classes: Any) -> tuple[float, float]:
        modelled, measured = zip(*(times.pop(name) for name in classes), strict=True)
        return sum(modelled), sum(measured)

    found = {part: total(classes) for part, classes in PARTS.items()}
    return found | {"waiting, others": total([*times])}


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(3.9)
    parts = milliseconds()
    for at, (modelled, measured) in enumerate(parts.values()):
        named = at == 0
        axis.barh(at - 0.19, measured, 0.34, color=drawing.BLUE, label="measured" * named)
        axis.barh(at + 0.19, modelled, 0.34, color=drawing.GREY, label="cost model" * named)
        for place, value in ((at - 0.19, measured), (at + 0.19, modelled)):
            axis.text(value + 0.3, place, f"{value:.1f}", va="center", fontsize=10.5)
    axis.set_yticks(range(len(parts)), list(parts))
    axis.set_ylim(len(parts) - 0.45, -0.55)
    axis.set_xlim(0, 40)
    drawing.label(axis, x="milliseconds of a step with three memories on an H100")
    drawing.legend(figure, axis)
    return figure
