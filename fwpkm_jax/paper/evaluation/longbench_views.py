"""The table, the plot and the finding of a LongBench result."""

from pathlib import Path

import numpy as np

from fwpkm_jax.evaluation.display import plot_style as style
from fwpkm_jax.evaluation.display.tables import Record, format_table, signed

_PASSES = {"writing": ("writing", style.BLUE), "frozen": ("frozen memory", style.ORANGE)}


def table(record: Record) -> str:
    """Perplexity by task and pass, and what writing changed."""
    results, config = record["results"], record["config"]
    passes = [name for name in _PASSES if name in results]
    header = ["task", "samples", "tokens each", "answer tokens"]
    header += [f"perplexity, {_PASSES[name][0]}" for name in passes]
    header += ["loss difference (95 %)"] if "difference" in results else []
    rows = []
    for task, facts in results["tasks"].items():
        row = [task, str(facts["samples"]), f"{facts['tokens']['mean']:,.0f}"]
        row += [f"{facts['answer_tokens']:,}"]
        row += [f"{results[name][task]['perplexity']:.4f}" for name in passes]
        if "difference" in results:
            row.append(signed(results["difference"][task]))
        rows.append(row)
    yarn = f"YaRN {config['yarn_factor']:g}" if config["yarn_factor"] else "no YaRN"
    title = f"LongBench answers (memory from the checkpoint in each {config['memory_reset']}"
    return f"{title}, {yarn})\n{format_table(header, rows)}"


def finding(record: Record) -> str:
    """In how many tasks writing lowered the loss, and in which of them the interval excludes 0."""
    difference = record["results"].get("difference")
    if not difference:
        return ""
    lower = [task for task, one in difference.items() if one["loss"] < 0]
    sure = [task for task in lower if (difference[task]["interval"] or [0, 0])[1] < 0]
    text = f"Writing lowered the answers' loss in {len(lower)} of {len(difference)} tasks"
    return f"{text}; at 95 % that is certain in {', '.join(sure) or 'none'}."


def plot(record: Record, directory: Path) -> list[Path]:
    """Plots the perplexity of each task's answers with writing enabled and disabled."""
    results = record["results"]
    passes = [name for name in _PASSES if name in results]
    tasks = list(results["tasks"])
    figure, axes = style.new_figure(max(4.6, 1.6 + 1.35 * len(tasks)), 4.2)
    width = 0.8 / len(passes)
    for order, name in enumerate(passes):
        label, color = _PASSES[name]
        at = np.arange(len(tasks)) + (order - (len(passes) - 1) / 2) * width
        values = [results[name][task]["perplexity"] for task in tasks]
        axes.bar(at, values, width * 0.92, color=color, label=label)
        for x, value in zip(at, values, strict=True):
            axes.text(
                x, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8, color=style.TEXT
            )
    counts = [results["tasks"][task]["samples"] for task in tasks]
    labels = [
        f"{task}\n{count} sample{'' if count == 1 else 's'}"
        for task, count in zip(tasks, counts, strict=True)
    ]
    axes.set_xticks(range(len(tasks)), labels)
    style.add_legend(axes, handlelength=0.9)
    style.finish(axes, "LongBench", "lower is better", ylabel="perplexity of the answers")
    return [style.save_figure(figure, directory / "longbench.png")]
