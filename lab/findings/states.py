"""State tracking: which products of past tokens a memory can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.stored import (
    Estimate,
    Line,
    lines_of,
    markdown,
    over_books_and_seeds,
    share_over_seeds,
)

LINES = "state_tracking_cpu.jsonl"


def runs(group: str, rule: str, **settings: Any) -> list[Line]:
    """The trainings of a rule on a task, with these settings, by seed."""
    found = [
        line
        for line in lines_of(LINES)
        if (line["group"], line["rule"]) == (group, rule)
        and all(line["settings"].get(name) == value for name, value in settings.items())
    ]
    return sorted(found, key=lambda line: line["seed"])


def spans(lines: Sequence[Line]) -> tuple[list[float], list[float]]:
    """Share of right labels within the training length, and in the last span, by training."""
    within, last = ([line["spans"][at]["accuracy"] for line in lines] for at in (0, -1))
    return within, last


SHORT = {"steps": 500, "length": 32}
LONG = {"steps": 4500, "start_token": True}
ONE_REFLECTION = ("deltanet+", "gated_deltanet+", "ojanet+", "kda+", "falcon")
"""Rules of one step per token whose write strengths reach 2."""


def _without() -> list[str]:
    rules = {line["rule"] for line in lines_of(LINES) if line["settings"]["steps"] == 500}
    return sorted(rules - {*ONE_REFLECTION, "deltaproduct+"})


def _pooled(group: str, rules: Sequence[str]) -> list[Line]:
    return [line for rule in rules for line in runs(group, rule, **SHORT)]


def _over(lines: Sequence[Line], values: Sequence[float]) -> Estimate:
    """Over the seeds of a rule; of several rules over rules and seeds, which share their data."""
    seeds, rules = ({line[name] for line in lines} for name in ("seed", "rule"))
    if len(rules) == 1:
        return share_over_seeds(values)
    at = {(x["seed"], x["rule"]): one for x, one in zip(lines, values, strict=True)}
    by_seed = [[at[seed, rule] for rule in sorted(rules)] for seed in sorted(seeds)]
    return over_books_and_seeds(np.array(by_seed)).clipped(0.0, 1.0)


def _cases() -> list[tuple[str, str, list[Line]]]:
    """Task, rule and trainings of each row."""
    two = "DeltaProduct, two steps, up to 2"
    one = "DeltaNet, one step, up to 2"
    largest, smaller = f"one step, up to 2 ({len(ONE_REFLECTION)} rules)", _without()
    values = {"every_value": True, "steps": 5000}
    return [
        ("parity", largest, _pooled("parity", ONE_REFLECTION)),
        ("parity", f"strengths up to 1 ({len(smaller)} rules)", _pooled("parity", smaller)),
        ("sums modulo 3", two, runs("mod3", "deltaproduct+", **SHORT)),
        ("permutations of 3", two, runs("s3", "deltaproduct+", **LONG)),
        ("permutations of 3", one, runs("s3", "deltanet+", **LONG)),
        ("permutations of 3", "DeltaProduct, up to 1", runs("s3", "deltaproduct", **LONG)),
        ("arithmetic", one, runs("arithmetic", "deltanet+", **values)),
        ("the same with brackets", one, runs("brackets", "deltanet+", **values)),
    ]


_CHANCE = {"parity": 1 / 2, "sums modulo 3": 1 / 3, "permutations of 3": 1 / 6}


def answer() -> str:
    cases = _cases()
    parity, _ = spans(cases[0][2])
    within, beyond = spans(cases[3][2])
    return (
        "One reflection per token gives parity: every rule of one step whose write strength reaches"
        f" 2 learns it, in each of {len(parity)} runs (worst {min(parity):.3f}), and no rule"
        " with smaller strengths does.\n"
        "Two reflections give permutations of three: DeltaProduct is right within the training"
        f" length in {sum(x > 0.99 for x in within)} of {len(within)} seeds and up to eight"
        f" times beyond it ({min(beyond):.3f} or more)."
    )


def table() -> str:
    rows = []
    for task, rule, lines in _cases():
        within, beyond = spans(lines)
        last = lines[0]["spans"][-1]
        rows.append(
            [
                task,
                rule,
                str(len(lines)),
                f"{_over(lines, within):.2f}",
                f"{_over(lines, beyond):.2f} (to {last['up_to']})",
                f"{_CHANCE.get(task, 0.2):.2f}",
            ]
        )
    head = ["task", "rule", "runs", "within the training length", "in the last span"]
    return markdown([*head, "a guess"], rows)


def notes() -> str:
    ours = {"steps": 4500, "heads": 8, "start_token": False}
    without = spans(runs("s3", "deltaproduct+", **ours))[0]
    (five,) = runs("s5", "deltaproduct+", length=12)
    return "\n".join(
        [
            "- A run that fails settles at a solution for the first tokens: it fails by where the"
            " optimiser goes, not by what the memory can hold. Without the start token"
            f" {sum(x > 0.99 for x in without)} of {len(without)} seeds find permutations of"
            " three.",
            "- Permutations of five were not learned in"
            f" {five['cpu_seconds'] / 60:.0f} CPU minutes ({five['spans'][-1]['accuracy']:.3f} of"
            " the labels, a guess 0.008).",
        ]
    )


def draw() -> Figure:
    names = [
        "parity, up to 2",
        "parity, up to 1",
        "modulo 3,\ntwo steps",
        "S3, two steps",
        "S3, one step",
        "S3, up to 1",
        "arithmetic",
        "with brackets",
    ]
    cases = _cases()
    found = [spans(lines) for *_, lines in cases]
    figure, (axis,) = drawing.new_figure(4.2)
    within, beyond = ([one[at] for one in found] for at in (0, 1))
    drawing.rows(axis, names, within, name="within the training length", offset=-0.13)
    drawing.rows(
        axis, names, beyond, color=drawing.ORANGE, hollow=True, name="in the last span", offset=0.13
    )
    for at, (task, *_) in enumerate(cases):
        chance = _CHANCE.get(task, 0.2)
        axis.plot([chance, chance], [at - 0.35, at + 0.35], color=drawing.GREY, linewidth=1.4)
    axis.set_xlim(0, 1.03)
    drawing.label(axis, x="share of labels that are right (grey line: a guess)")
    drawing.legend(figure, axis)
    return figure
