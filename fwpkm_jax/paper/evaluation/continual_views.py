"""The table, the plot and the finding of a continual-learning result."""

from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table


def table(record: Record) -> str:
    """Perplexity by stage and domain, and the mean effects of reading the domains."""
    results = record["results"]
    names = results["domains"]
    stages = ["initial memory", *(f"after {name}" for name in names)]
    rows = [
        [stage, *(f"{value:.4f}" for value in row)]
        for stage, row in zip(stages, results["perplexity"], strict=True)
    ]
    text = "Continual learning: perplexity with writing disabled\n"
    text += format_table(["memory", *names], rows)
    rows = [
        ["own domain, right after reading it", f"{results['adaptation']:+.4f}"],
        ["from there to the end", f"{results['forgetting']:+.4f}"],
    ]
    if results["unseen"] is not None:
        rows.append(["domains still to come", f"{results['unseen']:+.4f}"])
    return f"{text}\n\n" + format_table(["mean change of the loss", "nats per token"], rows)


def finding(record: Record) -> str:
    """How much reading a domain changed its loss, and how much of that was forgotten later."""
    results = record["results"]
    learned, lost = results["adaptation"], results["forgetting"]
    text = (
        f"Reading a domain {_moved(learned)} its loss by {abs(learned):.4f} nats per token on "
        f"average, and what was read after it {_moved(lost)} it by {abs(lost):.4f}"
    )
    if (unseen := results["unseen"]) is not None:
        text += f"; what was read before it had {_moved(unseen)} it by {abs(unseen):.4f}"
    return text + "."


def _moved(change: float) -> str:
    return "lowered" if change < 0 else "raised"


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots each domain's loss minus that of the initial memory, by stage."""
    results = record["results"]
    names = results["domains"]
    figure, axes = style.new_figure(8.2, 4.6)
    axes.axhline(0, color=style.GREY, lw=1)
    stages = np.arange(len(names) + 1)
    changes = np.array([[cell["loss"] for cell in row] for row in results["difference"]])
    for index in range(len(names)):
        color = style.COLORS[index % len(style.COLORS)]
        bounds = np.array(
            [row[index]["interval"] or [row[index]["loss"]] * 2 for row in results["difference"]]
        )
        axes.fill_between(stages, bounds[:, 0], bounds[:, 1], color=color, alpha=0.12, lw=0)
        axes.plot(stages, changes[:, index], color=color, lw=1.8, marker="o", ms=3.5)
        axes.plot(index + 1, changes[index + 1, index], color=color, marker="o", ms=9)
    _label_ends(axes, changes[-1], names)
    axes.set_xticks(stages, ["initial\nmemory", *(f"+ {name}" for name in names)])
    tokens = np.mean(results["eval_tokens"])
    style.finish(
        axes,
        "What reading one domain after the other changes",
        f"below 0 helps; large dot: right after the domain itself; about {tokens:,.0f} tokens "
        "scored in each, 95 % intervals",
        xlim=(-0.15, len(names) + 0.1),
        xlabel="domains read so far",
        ylabel="change of the loss (nats per token)",
    )
    return [style.save_figure(figure, directory / "continual.png")]


def _label_ends(axes: Any, ends: np.ndarray, names: list[str]) -> None:
    """Writes names at the ends of the lines, moved apart if they would overlap."""
    low, high = axes.get_ylim()
    order = np.argsort(ends)
    places = ends[order]
    for place in range(1, len(places)):
        places[place] = max(places[place], places[place - 1] + 0.05 * (high - low))
    places += np.mean(ends[order] - places)
    for index, place in zip(order, places, strict=True):
        color = style.COLORS[index % len(style.COLORS)]
        axes.annotate(
            names[index], (len(names), ends[index]), (len(names) + 0.18, place), va="center",
            color=color, weight="bold", fontsize=9, annotation_clip=False,
        )  # fmt: skip
