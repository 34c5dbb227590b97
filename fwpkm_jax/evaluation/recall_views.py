"""The table, the plot and the finding of recall."""

from pathlib import Path

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table, share

_FEWEST_ANSWERS = 20  # Ranges with fewer would show chance, not the model; the table has them.


def table(record: Record) -> str:
    """A table of both passes' accuracy: overall, beyond the attention window, by distance."""
    results = record["results"]
    writing, frozen = results["writing"], results["frozen"]
    named = [("all", "all answers"), ("beyond_window", f"beyond window ({results['window']})")]
    named.append(("beyond_reach", f"beyond all layers' reach ({results['reach']})"))
    pairs = [(label, writing[key], frozen[key]) for key, label in named if writing[key]]
    pairs += [
        (f"distance {on['above'] + 1}-{on['up_to']}", on, off)
        for on, off in zip(writing["by_distance"], frozen["by_distance"], strict=True)
    ]
    rows = [[label, f"{on['answers']:,}", share(on), share(off)] for label, on, off in pairs]
    header = ["recall", "answers", "memory writing", "writing disabled"]
    return format_table(header, rows) + f"\nchance {results['chance']:.3f}"


def finding(record: Record) -> str:
    """Share of correct answers with and without writing, beyond the attention's reach if asked."""
    results = record["results"]
    key, where = next(
        (key, where)
        for key, where in (
            ("beyond_reach", "further away than all layers' attention together reaches"),
            ("beyond_window", "further away than one layer's attention reaches"),
            ("all", "asked for at any distance"),
        )
        if results["writing"][key]
    )
    on, off = results["writing"][key], results["frozen"][key]
    return (
        f"Of {on['answers']:,} facts {where}, {on['accuracy']:.1%} were answered right with the "
        f"memory writing and {off['accuracy']:.1%} with writing disabled; guessing gives "
        f"{results['chance']:.1%}."
    )


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots accuracy by distance with writing enabled and disabled; marks the attention window."""
    results = record["results"]
    figure, axes = style.new_figure(7.2, 4.2)
    edge = results["length"]
    window, reach = results["window"], results["reach"]
    for bound, label in ((window, "attention window"), (reach, "reach of all layers")):
        if bound:
            axes.axvspan(0, min(bound, edge), color=style.GREY, alpha=0.13, lw=0)
            axes.annotate(
                f"{label}\n{bound} tokens", (min(bound, edge), 0.5), xytext=(-5, 0),
                textcoords="offset points", ha="right", va="center", rotation=90,
                color=style.GREY, fontsize=8.5,
            )  # fmt: skip
    axes.axhline(results["chance"], color=style.GREY, lw=1, ls=(0, (4, 3)))
    axes.text(edge / 100, results["chance"] + 0.01, f"chance {results['chance']:.3f}",
              color=style.GREY, va="bottom", fontsize=8.5)  # fmt: skip
    for name, label, color in (
        ("writing", "memory writing", style.BLUE),
        ("frozen", "writing disabled", style.ORANGE),
    ):
        bins = [b for b in results[name]["by_distance"] if b["answers"] >= _FEWEST_ANSWERS]
        at = [(b["above"] + 1 + b["up_to"]) / 2 for b in bins]
        accuracy = np.array([b["accuracy"] for b in bins])
        bounds = np.array([b["interval"] for b in bins]).reshape(-1, 2)
        axes.fill_between(at, bounds[:, 0], bounds[:, 1], color=color, alpha=0.18, lw=0)
        total = results[name]["all"]["accuracy"]
        axes.plot(at, accuracy, color=color, marker="o", ms=4.5, lw=1.8, clip_on=False,
                  label=f"{label}: {total:.3f}")  # fmt: skip
    style.add_legend(axes)
    answers = results["writing"]["all"]["answers"]
    style.finish(
        axes,
        "Recall of stated facts by distance",
        f"{answers:,} answers, 95 % intervals",
        xlim=(0, edge),
        ylim=(-0.01, 1.02),
        xlabel="distance from the stated fact to the answer (tokens)",
        ylabel="answers right (share)",
    )
    return [style.save_figure(figure, directory / "recall.png")]
