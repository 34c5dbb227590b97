"""The table, the plot and the finding of gate histograms."""

import itertools
from pathlib import Path

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table


def table(record: Record) -> str:
    """The share of tokens in each bin of the gate, as a table by data set and memory layer."""
    results = record["results"]
    bounds = results["bins"]
    header = ["data", "memory", "mean"]
    header += [f"{low:.2g}-{high:.2g}" for low, high in itertools.pairwise(bounds)]
    rows = [
        [name, layer, f"{one['mean']:.4f}", *(f"{share:.3f}" for share in one["share"])]
        for name, layers in results["gates"].items()
        for layer, one in layers.items()
    ]
    return f"Gates: share of the tokens{_unused(results)}\n{format_table(header, rows)}"


def finding(record: Record) -> str:
    """The mean gate of each layer over all data sets."""
    results = record["results"]
    sums: dict[str, float] = {}
    for name, layers in results["gates"].items():
        for layer, one in layers.items():
            sums[layer] = sums.get(layer, 0.0) + one["mean"] * results["tokens"][name]
    total = sum(results["tokens"].values())
    means = [f"{value / total:.2f} in {layer.replace('_', ' ')}" for layer, value in sums.items()]
    return f"Over {total:,} tokens the gate was on average {', '.join(means)}{_unused(results)}."


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots a histogram for each memory layer with a line for each data set."""
    results = record["results"]
    sources = list(results["gates"])
    layers = list(results["gates"][sources[0]])
    figure = style.blank_figure(1.2 + 3.6 * len(layers), 3.8)
    panels = figure.subplots(1, len(layers), sharey=True, squeeze=False)[0]
    for axes, layer in zip(panels, layers, strict=True):
        for index, name in enumerate(sources):
            one = results["gates"][name][layer]
            color = style.COLORS[index % len(style.COLORS)]
            axes.stairs(one["share"], results["bins"], color=color, lw=1.8, label=Path(name).name)
            axes.stairs(one["share"], results["bins"], color=color, alpha=0.12, fill=True)
        means = ", ".join(f"{results['gates'][name][layer]['mean']:.2f}" for name in sources)
        style.finish(
            axes,
            layer.replace("_", " "),
            f"mean gate {means}",
            xlim=(0, 1),
            ylim=(0, None),
            xlabel="gate (1: the memory alone)",
        )
    panels[0].set_ylabel("share of the tokens")
    if len(sources) > 1:
        panels[-1].legend(frameon=False, fontsize=9)
    return [style.save_figure(figure, directory / "gates.png")]


def _unused(results: Record) -> str:
    return "" if results["gate_used"] else "; this model's output does not depend on them"
