"""Does it generalise? Needles in words that training did not have, digit by digit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fwpkm_jax.evaluation.intervals import wilson
from lab.findings import drawing
from lab.findings.stored import (
    Estimate,
    lines_of,
    markdown,
    resampled,
    share_over_seeds,
)

SMALL = "other_words_cpu.jsonl"
LARGE, REHEARSAL = "real_size_h200.jsonl", "real_size_rehearsal_cpu.jsonl"
_SMALL_WORDS = {
    "of training": "those of training",
    "one word changed": "one word changed (`code` for `number`)",
    "words inserted": "`, as we know,` inserted",
    "a longer sentence": "`Whoever owns locker K opens it with the code`",
}
_LARGE_WORDS = {
    "trained": "one of the 102 of training",
    "held out": "one of 20 that were held out",
    "held out, asked otherwise": "held out, and asked in another of them",
}


GUESS = 1 / 5 + 4 / 5 / 10
"""Share of first digits that one of a haystack's five numbers, drawn at random, has right: it may
be another number that begins with the same digit."""


class Score(NamedTuple):
    """Answers in some words: shares, with intervals over trainings or over haystacks."""

    words: str
    first: Estimate
    later: Estimate
    exact: Estimate


def small() -> list[Score]:
    """The study's models with gates that start open, whose training has one sentence."""
    found = []
    for key, words in _SMALL_WORDS.items():
        lines = [line for line in lines_of(SMALL) if line["words"] == key and line["readings"]]
        digits = np.array([line["digits"] for line in lines])  # [trainings, digits]
        right = digits[:, 0], digits[:, 1:].sum(axis=1), np.array([x["exact"] for x in lines])
        asked = np.array([line["samples"] for line in lines])
        trials = asked, asked * (digits.shape[1] - 1), asked
        found.append(Score(words, *map(_estimate, right, trials)))
    return found


def _estimate(right: np.ndarray, trials: np.ndarray) -> Estimate:
    """Over the trainings; of one training, over its answers (Wilson)."""
    if len(right) > 1:
        return share_over_seeds(right / trials)
    low, high = wilson(int(right[0]), int(trials[0]))
    return Estimate(float(right[0] / trials[0]), low, high)


def large() -> list[Score]:
    """The model of 24 million weights after 275 steps, read four times."""
    return [_of_haystacks(LARGE, key) for key in _LARGE_WORDS]


def rehearsal() -> Score:
    """A model of two million weights with the same wordings and shorter haystacks, in new words."""
    return _of_haystacks(REHEARSAL, "held out")


def _of_haystacks(name: str, words: str) -> Score:
    (line,) = [line for line in _needles(name, words) if line["way"] == "written"]
    exact, first, digits, _ = np.array(line["by_haystack"]).T
    later = (6 * digits - first) / 5
    return Score(_LARGE_WORDS[words], *map(resampled, (first, later, exact)))


def _needles(name: str, words: str) -> list[dict]:
    lines = [
        line
        for line in lines_of(name)
        if line["part"] == "needles" and line["variant"] == "fwpkm" and line["words"] == words
    ]
    shortest = min(line["bytes"] for line in lines)
    return [line for line in lines if line["bytes"] == shortest and line["reading"] == 4]


def answer() -> str:
    scores = {one.words: one for one in small()}
    _, near, *others = scores.values()
    held_out = large()[1]
    first = [one.first.mean for one in others]
    return (
        "In part: a small model that learned one sentence still answers when one word of it is"
        f" changed ({near.exact.mean:.2f}), but not in another sentence. There it completes"
        f" a number once its first digits are given ({_range([one.later.mean for one in others])}"
        " of the digits), and chooses the right one of five numbers no more often than at random"
        f" ({_range(first)}).\n"
        "Models that learned 102 wordings find the number in part of the questions in new words:"
        f" {held_out.first.mean:.2f} with 24M weights, {rehearsal().first.mean:.2f} with 2M in"
        " shorter texts."
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{one:.2f}" for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table() -> str:
    rows = []
    for model, scores in (
        ("0.6M weights", small()),
        ("24M weights", large()),
        ("2M weights", [rehearsal()]),
    ):
        rows += [
            [model, one.words, f"{one.first:.2f}", f"{one.later:.2f}", f"{one.exact.mean:.2f}"]
            for one in scores
        ]
    head = ["model", "words", "first digit", "later digits", "all six, said freely"]
    return markdown(head, rows)


def draw() -> Figure:
    names = [
        *("words of training", "one word changed", "words inserted"),
        *("longer sentence", "24M: words of training", "24M: new words"),
        *("24M: asked otherwise", "2M: new words"),
    ]
    scores = [*small(), *large(), rehearsal()]
    figure, (axis,) = drawing.new_figure(4.2)
    drawing.rows(
        axis,
        names,
        [[one.later.mean] for one in scores],
        color=drawing.GREY,
        hollow=True,
        name="digits after the first",
    )
    drawing.rows(axis, names, [[one.first.mean] for one in scores], name="first digit")
    for at, one in enumerate(scores):
        axis.plot([one.first.low, one.first.high], [at, at], color=drawing.BLUE, linewidth=1.2)
    axis.axvline(GUESS, color=drawing.ORANGE, linewidth=1.2, linestyle="--")
    axis.text(
        GUESS + 0.01, -0.42, "one of five at random", color=drawing.ORANGE, fontsize=9.5, va="top"
    )
    axis.set_xlim(0, 1.02)
    axis.axhline(3.5, color=drawing.GREY, linewidth=0.8)
    drawing.label(axis, x="share right")
    drawing.legend(figure, axis)
    return figure
