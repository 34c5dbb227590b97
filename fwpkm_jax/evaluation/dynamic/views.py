"""The table and the finding of dynamic evaluation."""

from __future__ import annotations

from fwpkm_jax.evaluation.display.tables import Record, format_table, signed


def table(record: Record) -> str:
    """Perplexity by data set and speed, without and with gradient steps."""
    results = record["results"]
    plain, dynamic, difference = (results[name] for name in ("plain", "dynamic", "difference"))
    rows = []
    for name in [*plain["by_source"], "all"] if len(plain["by_source"]) > 1 else ["all"]:
        one, other, change = (
            x["all"] if name == "all" else x["by_source"][name]
            for x in (plain, dynamic, difference)
        )
        perplexities = [f"{x['perplexity']:.4f}" for x in (one, other)]
        rows.append([name, f"{one['tokens']:,}", *perplexities, signed(change)])
    header = ["data", "tokens", "perplexity, plain", "dynamic", "loss difference (95 %)"]
    text = "Dynamic evaluation\n" + format_table(header, rows)
    speeds = [plain["tokens_per_second"], dynamic["tokens_per_second"]]
    if None in speeds:
        return text
    return text + (
        f"\ntokens per second: plain {speeds[0]:,.0f}, dynamic {speeds[1]:,.0f}, "
        f"{results['slowdown']:.1f} times the time"
    )


def finding(record: Record) -> str:
    """How the gradient steps changed the perplexity, and how much time they took."""
    results = record["results"]
    loss = results["difference"]["all"]["loss"]
    text = (
        f"Gradient steps on what was read took the perplexity from "
        f"{results['plain']['all']['perplexity']:.3f} to "
        f"{results['dynamic']['all']['perplexity']:.3f}, {loss:+.4f} nats per token"
    )
    if results["slowdown"] is None:
        return text + "."
    return text + f", and reading took {results['slowdown']:.1f} times as long."
