"""Tables of lines whose programs are gone; `lab.pages` writes them into this folder's pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lab.comparison.mqar_tables import changes
from lab.findings.stored import markdown
from lab.study.tables import over_seeds

Line = dict[str, Any]


def beside_attention(lines: Sequence[Line]) -> str:
    """Each run's shares of right answers, and its gates."""
    heads = ["model", "seed", "updates", "right", "memory frozen", "attention limited", "both"]
    rows = []
    for kind, line in _by_kind(lines):
        shares = [
            (line[key]["writing"], line[key]["frozen"]) if key in line else (None, None)
            for key in ("whole", "limited")
        ]
        if line["gates"] is None:  # Nothing that could be frozen.
            shares = [(written, None) for written, _ in shares]
        cells = [*shares[0], *shares[1], *(line["gates"] or (None, None))]
        shown = ["" if cell is None else f"{cell:.3f}" for cell in cells]
        rows.append([f"`{kind}`", line["run"].partition(":")[2], str(line["steps"]), *shown])
    return markdown([*heads, "gate at questions", "elsewhere"], rows)


def facts_by_gradient(lines: Sequence[Line]) -> str:
    """Shares of right answers by moment, of each run, way, rate and number of steps."""
    plan = lines[0]["settings"]
    heads = ["run", "what learns", "rate", "steps per reading", "told once"]
    heads += [f"told {plan['readings']} times"]
    heads += [f"after {plan['other_facts']} haystacks with other facts"]
    heads += ["loss of the haystacks before", "and after all readings"]
    rows = []
    for line in lines:
        cells = [line["run"], line["way"], f"{line['rate']:g}", str(line["steps"])]
        cells += [f"{line['facts'][key]['exact']:.2f}" for key in ("told_1", "told", "other")]
        rows.append([*cells, *(f"{line['loss'][key]:.2f}" for key in ("before", "told"))])
    return markdown(heads, rows)


def fast_weight_layers(lines: Sequence[Line]) -> str:
    """Loss by steps, over the seeds, against none, with the time of a token relative to none."""
    none = {line["seed"]: line for line in lines if line["steps"] == "none"}
    heads = [
        "steps",
        "seeds",
        "loss, nats",
        "perplexity",
        "against none, each seed",
        "mean",
        "time",
    ]
    rows = []
    for steps in dict.fromkeys(line["steps"] for line in lines):
        own = [line for line in lines if line["steps"] == steps]
        gaps = [line["loss"] - none[line["seed"]]["loss"] for line in own]
        cells = [
            steps,
            str(len(own)),
            f"{_mean(own, 'loss'):.3f}",
            f"{_mean(own, 'perplexity'):.2f}",
        ]
        against = ["", ""]
        if steps != "none":
            mean = over_seeds(gaps, digits=3) if len(gaps) > 1 else ""
            against = [", ".join(f"{gap:+.3f}" for gap in gaps), mean]
        time = "cpu_microseconds_per_token"
        rows.append([*cells, *against, f"{_mean(own, time) / _mean([*none.values()], time):.2f}"])
    return markdown(heads, rows)


def lasting(lines: Sequence[Line]) -> str:
    """Recall by the number of conversations since."""
    numbers = sorted({line["conversations"] for line in lines})
    shown = [n for n in numbers if n in (-1, 0, 1, 2, 5, 10, 20) or n == numbers[-1]]
    rows = []
    for kind in dict.fromkeys(line["text"] for line in lines):
        of_kind = {line["conversations"]: line for line in lines if line["text"] == kind}
        rows.append([kind, *(f"{of_kind[number]['recall']:.2f}" for number in shown)])
    return markdown(["conversations since", *map(_since, shown)], rows)


def lasting_text(lines: Sequence[Line]) -> str:
    """Exact answers with intervals, and digits, by the number of conversations since."""
    rows = []
    for run in dict.fromkeys(line["run"] for line in lines):
        own = [line for line in lines if line["run"] == run]
        exact = ["{:.2f} [{:.2f}, {:.2f}]".format(x["exact"], *x["interval"]) for x in own]
        rows += [[f"{run}, exact", *exact]]
        rows += [[f"{run}, digits", *(f"{line['digits']:.1f}" for line in own)]]
    numbers = dict.fromkeys(line["conversations"] for line in lines)
    return markdown(["conversations since", *map(_since, numbers)], rows)


def mqar_heads(lines: Sequence[Line]) -> str:
    """What each head's queries found after each watched epoch; heads side by side."""
    heads = ["memory", "seed", "start", "updates", "loss", "own key nearest", "farthest"]
    heads += ["cosine with own key", "with others", "strength where stated", "where asked"]
    rows = []
    for line in lines:
        start = ", ".join(changes(line["settings"])) or "as published"
        for point in line["curve"]:
            cells = [f"`{line['memory']}`", str(line["seed"]), start]
            cells += [str(point["step"]), f"{point['loss']:.2f}"]
            for key in ("nearest", "farthest", "own", "others", "stated", "asked"):
                cells.append(", ".join(f"{x:.2f}" for x in point.get(key, ())))
            rows.append(cells)
    return markdown(heads, rows)


def packed(lines: Sequence[Line]) -> str:
    """Perplexities of each kind, means over its seeds, by layout of the documents."""
    names = [(part, way) for part in ("start", "rest") for way in ("alone", "resets", "joined")]
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in _by_kind(lines)):
        own = [line for other, line in _by_kind(lines) if other == kind]
        means = [math.exp(_mean(own, f"{way}_{part}")) for part, way in names]
        rows.append([kind, str(len(own)), *(f"{mean:.3f}" for mean in means)])
    return markdown(["trained", "seeds", *(f"{part}, {way}" for part, way in names)], rows)


def packed_differences(lines: Sequence[Line]) -> str:
    """Loss of one kind minus that of another, in nats, over the seeds that both have."""
    by_run = {line["run"]: line for line in lines}
    pairs = (
        ("backbone_joined", "backbone_resets"),
        ("keeping_joined", "keeping_resets"),
        ("fwpkm_joined", "carry"),
        ("carry", "backbone_resets"),
        ("document", "backbone_resets"),
    )
    names = [(part, way) for part in ("start", "rest") for way in ("alone", "resets")]
    rows = []
    for one, other in pairs:
        own = [run.partition(":")[2] for run in by_run if run.startswith(f"{one}:")]
        seeds = [seed for seed in own if f"{other}:{seed}" in by_run]
        cells = [f"{one} minus {other}", str(len(seeds))]
        for part, way in names:
            key = f"{way}_{part}"
            gaps = [by_run[f"{one}:{x}"][key] - by_run[f"{other}:{x}"][key] for x in seeds]
            cells.append(over_seeds(gaps, digits=3) if len(gaps) > 1 else f"{gaps[0]:.3f}")
        rows.append(cells)
    heads = ["difference, nats", "seeds", *(f"{part}, {way}" for part, way in names)]
    return markdown(heads, rows)


def retrofit(lines: Sequence[Line]) -> str:
    """Perplexity, also relative to the backbone's, and shares of needles, by run."""
    base = next((x["perplexity"] for x in lines if x["run"] == "backbone:0"), None)
    needles = list(dict.fromkeys(name for line in lines for name in line if name[:5] == "words"))
    heads = ["run", "trained", "perplexity", "against the backbone"]
    rows = []
    for line in lines:
        change = "" if base is None else f"{line['perplexity'] / base - 1:+.2%}"
        cells = [line["run"], f"{line['trained']:,}", f"{line['perplexity']:.3f}", change]
        for name in needles:
            share, low, high, _ = line.get(name, (None,) * 4)
            cells.append("" if share is None else f"{share:.2f} [{low:.2f}, {high:.2f}]")
        rows.append(cells)
    return markdown([*heads, *(name.replace("_", " ") for name in needles)], rows)


def users(lines: Sequence[Line]) -> str:
    """Shares of right answers to own facts and to those of the next user, and bytes of a user."""
    shares = {
        "own facts": "own_facts",
        "the same before reading": "own_facts_without_reading",
        "of the next user, never stated": "next_users_facts_never_stated",
        "of the next user, stated otherwise": "next_users_facts_stated_otherwise",
    }
    sizes = {
        "rows and their numbers per user": "rows_in_use",
        "private sub-keys per user": "sub_keys",
        "a private table instead": "private_table",
    }
    rows = [
        [f"{name}, {lines[0][key]['answers']:,} questions"]
        + [f"{line[key]['share']:.4f}" for line in lines]
        for name, key in shares.items()
    ]
    rows.append(["chance", *(f"{line['chance']:.4f}" for line in lines)])
    written = [line["rows"] for line in lines]
    rows.append(["rows written by a user, mean", *(f"{row['mean']:,.0f}" for row in written)])
    for name, key in sizes.items():
        rows.append([name, *(f"{line['kilobytes'][key]:,.0f} kB" for line in lines)])
    return markdown(["", *(f"{line['slots']:,} slots" for line in lines)], rows)


def _by_kind(lines: Sequence[Line]) -> Iterator[tuple[str, Line]]:
    """The runs KIND:SEED of each kind together, in order of the seeds."""
    kinds = list(dict.fromkeys(line["run"].partition(":")[0] for line in lines))
    for kind in kinds:
        own = [line for line in lines if line["run"].partition(":")[0] == kind]
        yield from ((kind, line) for line in sorted(own, key=lambda line: line["run"]))


def _since(conversations: int) -> str:
    return "before" if conversations < 0 else str(conversations)


def _mean(lines: Sequence[Line], name: str) -> float:
    return float(np.mean([line[name] for line in lines]))
