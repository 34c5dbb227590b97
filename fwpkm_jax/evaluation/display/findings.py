"""Summaries of results in one or two sentences."""

from __future__ import annotations

from fwpkm_jax.evaluation.display.tables import Record


def perplexity_finding(record: Record) -> str:
    """Perplexity of each pass, and what writing changed."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    scores = {name: results[name]["all"] for name in passes}
    named = {"writing": "with the memory writing", "frozen": "with the memory frozen"}
    text = " and ".join(f"{scores[name]['perplexity']:.3f} {named[name]}" for name in passes)
    text = f"Over {scores[passes[0]]['tokens']:,} tokens the perplexity was {text}"
    difference = results.get("difference")
    if not difference:
        return text + "."
    loss, interval = difference["all"]["loss"], difference["all"]["interval"]
    text += f": writing {'lowered' if loss < 0 else 'raised'} the loss by {abs(loss):.4f} nats"
    if interval is None:
        return text + "."
    text += f" (the change lies in [{interval[0]:+.4f}, {interval[1]:+.4f}] at 95 %)."
    if interval[0] <= 0 <= interval[1]:
        text += " That interval contains 0: on this much text no effect is certain."
    return text


def recall_finding(record: Record) -> str:
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


def needle_finding(record: Record) -> str:
    """Share of exact answers after the fewest and the most readings, for each length."""
    lengths: dict[int, dict[int, float]] = {}
    for run in record["results"]["runs"]:
        lengths.setdefault(run["words"], {})[run["readings"]] = run["exact"]["accuracy"]
    texts = []
    for words, shares in lengths.items():
        first, last = min(shares), max(shares)
        text = f"of haystacks of {words:,} words {shares[first]:.1%} were answered right after "
        text += f"{first} reading" + ("s" if first > 1 else "")
        texts.append(text + (f" and {shares[last]:.1%} after {last}" if last > first else ""))
    return _sentence("; ".join(texts))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
