"""The table and the finding of a result of lm-evaluation-harness."""

from typing import Any

from fwpkm_jax.evaluation.display.tables import PASSES, Record, format_table


def table(record: Record) -> str:
    """Every score of every task, with its standard error, by pass."""
    results, config = record["results"], record["config"]
    passes = [name for name in PASSES if name in results]
    rows = []
    for task, facts in results[passes[0]].items():
        for number, score in enumerate(facts["metrics"]):
            row = [task, score["metric"], _text(facts["num_fewshot"]), _text(facts["documents"])]
            rows.append(row + [_score(results[name][task]["metrics"][number]) for name in passes])
    header = ["task", "score", "shots", "documents", *(PASSES[name] for name in passes)]
    memory = {"text": "reset at every request", "never": "never reset"}[config["memory_reset"]]
    return (
        f"lm-evaluation-harness {results['lm_eval']} (memory {memory})\n"
        f"{format_table(header, rows)}\nscores with their standard errors"
    )


def finding(record: Record) -> str:
    """The first score of each task in both passes."""
    results = record["results"]
    if not all(name in results for name in PASSES):
        return ""
    texts = []
    for task, facts in results["writing"].items():
        if facts["metrics"]:
            on, off = facts["metrics"][0], results["frozen"][task]["metrics"][0]
            texts.append(f"{task} {on['metric']} {on['value']:.4g} and {off['value']:.4g}")
    return f"With the memory writing and frozen: {'; '.join(texts)}." if texts else ""


def _score(score: dict[str, Any]) -> str:
    error = score["standard_error"]
    return f"{score['value']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
