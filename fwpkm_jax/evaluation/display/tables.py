"""Results as text tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table; the first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            f"{entry:{'<' if i == 0 else '>'}{widths[i]}}" for i, entry in enumerate(row)
        )
        return "  ".join([first, *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows)])


def signed(difference: Record) -> str:
    """A difference of losses as text, with its interval if it has one."""
    if difference["interval"] is None:
        return f"{difference['loss']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['loss']:+.4f} [{low:+.4f}, {high:+.4f}]"


def perplexity_table(record: Record) -> str:
    """Tables of perplexity by data set and pass, and of the use of the memory by layer."""
    results = record["results"]
    passes = [name for name in ("writing", "frozen") if name in results]
    first = results[passes[0]]
    difference = results.get("difference")
    header = ["data", "tokens", *(f"perplexity, {_PASSES[name]}" for name in passes)]
    header += ["loss difference (95 %)"] if difference else []
    names = [*first["by_source"], "all"]
    rows = []
    for name in names if len(names) > 2 else names[:1]:
        row = [name, f"{_pick(first, name)['tokens']:,}"]
        row += [f"{_pick(results[p], name)['perplexity']:.4f}" for p in passes]
        if difference:
            row.append(signed(_pick(difference, name)))
        rows.append(row)
    text = "Streaming perplexity\n" + format_table(header, rows)
    layers = _layer_rows(first)
    if layers:
        header = ["memory", "gate", "collision", "coverage", "kld", "windows"]
        text += f"\n\nUse of the memory, {_PASSES[passes[0]]}\n" + format_table(header, layers)
    return text


def recall_table(record: Record) -> str:
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
    rows = [[label, f"{on['answers']:,}", _share(on), _share(off)] for label, on, off in pairs]
    header = ["recall", "answers", "memory writing", "writing disabled"]
    return format_table(header, rows) + f"\nchance {results['chance']:.3f}"


def needle_table(record: Record) -> str:
    """A table of exact, digit and candidate match by haystack length and number of readings."""
    config, provenance = record["config"], record["provenance"]
    kept = {"never": "never reset", "sample": "reset between samples"}
    memory = kept.get(provenance["resets"]["memory"], "reset at every reading")
    rows = [
        [
            f"{run['words']:,}",
            f"{run['token_length']['mean']:,.0f}",
            str(run["yarn_factor"] or "-"),
            str(run["readings"]),
            str(run["exact"]["answers"]),
            _share(run["exact"]),
            f"{run['digits']:.2f}",
            f"{run['candidate']['accuracy']:.3f}",
        ]
        for run in record["results"]["runs"]
    ]
    header = ["words", "tokens", "YaRN", "readings", "samples", "exact match"]
    header += [f"digits of {config['value_digits']}", "any needle"]
    title = f"Needle in a haystack (mode {config['mode']}, memory {memory}"
    title += ")" if config["write"] else ", writing disabled)"
    return f"{title}\n{format_table(header, rows)}\ntokens per write: {provenance['chunk_size']}"


_PASSES = {"writing": "writing", "frozen": "frozen memory"}


def _pick(scores: Record, name: str) -> Record:
    return scores["all"] if name == "all" else scores["by_source"][name]


def _share(score: Record) -> str:
    low, high = score["interval"]
    return f"{score['accuracy']:.3f} [{low:.3f}, {high:.3f}]"


def _layer_rows(scores: Record) -> list[list[str]]:
    rows = []
    for layer, gate in scores["gate_mean"].items():
        measures = scores["addressing"].get(layer)
        values = ["-"] * 3
        if measures:
            values = [f"{measures[name]:.4f}" for name in ("collision", "coverage", "kld")]
        rows.append([layer, f"{gate:.4f}", *values, str(measures["windows"] if measures else 0)])
    if len(rows) > 1 and (mean := scores["addressing"].get("mean")):
        gate = sum(scores["gate_mean"].values()) / len(rows)
        values = [f"{mean[name]:.4f}" for name in ("collision", "coverage", "kld")]
        rows.append(["mean", f"{gate:.4f}", *values, ""])
    return rows
