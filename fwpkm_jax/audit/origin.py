"""Where answers come from: what the answers under every condition say, from their records alone.

`audit.asking` makes the records; those of another program can be judged as well.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from scipy.stats import binomtest

from fwpkm_jax.audit.lines import Line, judged
from fwpkm_jax.evaluation.intervals import bootstrap

Condition = Literal[
    "written", "frozen", "reset", "without reads", "other memory", "not stated",
    "written, caches kept", "frozen, caches kept",
]  # fmt: skip
"""written: the text is read and written, all caches are emptied, and the question is asked. frozen:
the same with writing disabled. reset: the memory is put back before the question. without reads:
the memory's slots are zero when it is asked. other memory: it is asked with another text's memory.
not stated: the text states other values. caches kept: caches stay, so windows may answer."""

CONTROLS: tuple[Condition, ...] = (
    *("frozen", "reset", "without reads", "other memory", "not stated"),
)
"""Conditions under which answers that are right more often than by guessing are no recall."""

_SURE = 0.001  # Of a control: how unlikely an excess over guessing must be to count as one.


class Answer(NamedTuple):
    """What was said to one question under one condition.

    Attributes:
      run: name of the model.
      document: number of the text.
      question: number of the question in its text.
      condition: see `Condition`.
      depth: where the value is stated, 0 to 1 of the text.
      distance: tokens from the value to the end of the text.
      reach: tokens that windows look back in all layers together; None if a mixer looks back
        without bound.
      written: whether the chunk that states the value was written before the question.
      expected: the value.
      answer: what the model generated freely, one token after the other.
      exact: whether they are equal.
      forced: share of the value's tokens that are the likeliest where all before them are given.
      first: whether its first token is the likeliest of those that a value can begin with.
      nats: minus the logarithm of the value's probability.
      chance: probability that a guess is exact.
      first_chance: probability that a guess of the first token is right.
    """

    run: str
    document: int
    question: int
    condition: str
    depth: float
    distance: int
    reach: int | None
    written: bool
    expected: str
    answer: str
    exact: bool
    forced: float
    first: bool
    nats: float
    chance: float
    first_chance: float


def headline(answers: Sequence[Answer]) -> str:
    """The sentence at the top of the page, computed from the answers alone."""
    own, how = _counted(answers, "written"), "with every cache empty and the memory written"
    if not own:
        own, how = _counted(answers, "written, caches kept"), "from caches alone, without a memory"
    if not own:
        return "No question was asked; see the lines for why."
    frozen = _counted(answers, "frozen")
    share, low_high = _share(own)
    seeds = len({one.run for one in own})
    text = f"Of {len(own)} stated values {share:.3f}{low_high} were generated exactly right {how}"
    if frozen:
        text += f", {_share(frozen)[0]:.3f} with the memory frozen"
    text += f"; guessing gives {own[0].chance:.2g}."
    if seeds == 1:
        return f"{text} One trained model: the interval says nothing of other trainings."
    return f"{text} {seeds} trainings; the interval is over trainings and texts."


def figures(answers: Sequence[Answer]) -> dict[str, str]:
    """What was measured beside the headline, by name: numbers that no check judges."""
    found = {
        f"recall, {name}": _recall(own)
        for name in get_args(Condition)
        if name not in CONTROLS and (own := _counted(answers, name))
    }
    if _counted(answers, "written"):
        found["what windows cover"] = _by_reach(answers)
    return found


def origin_lines(answers: Sequence[Answer]) -> list[Line]:
    """The lines of the controls, under which no answer may be right but by guessing."""
    return [_control(answers, name) for name in CONTROLS if _counted(answers, name)]


def _of(answers: Sequence[Answer], condition: str) -> list[Answer]:
    return [one for one in answers if one.condition == condition]


def _counted(answers: Sequence[Answer], condition: str) -> list[Answer]:
    """The answers of a condition whose values were written before the question."""
    return [one for one in _of(answers, condition) if one.written]


def _sums(answers: Sequence[Answer], values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sums, sizes and runs by document."""
    runs = {name: number for number, name in enumerate(sorted({one.run for one in answers}))}
    keys = np.array([(runs[one.run], one.document) for one in answers])
    documents, inverse = np.unique(keys, axis=0, return_inverse=True)
    sums = np.bincount(inverse.ravel(), weights=values, minlength=len(documents))
    return sums, np.bincount(inverse.ravel(), minlength=len(documents)), documents[:, 0]


def _share(answers: Sequence[Answer], values: np.ndarray | None = None) -> tuple[float, str]:
    """A mean of the exact answers, or of other values, and its interval as text."""
    values = np.array([one.exact for one in answers], float) if values is None else values
    found = bootstrap(*_sums(answers, values))
    text = "" if found is None else f" [{found.low:.3f}, {found.high:.3f}]"
    return float(values.mean()), text


def _numbers(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "texts": len({(one.run, one.document) for one in answers}),
        "runs": sorted({one.run for one in answers}),
        "exact": float(np.mean([one.exact for one in answers])),
        "forced": float(np.mean([one.forced for one in answers])),
        "first": float(np.mean([one.first for one in answers])),
        "nats": float(np.mean([one.nats for one in answers])),
        "chance": answers[0].chance,
        "first_chance": answers[0].first_chance,
    }


def _recall(own: Sequence[Answer]) -> str:
    """The accuracies of a condition in words."""
    numbers = _numbers(own)
    share, interval = _share(own)
    return (
        f"Exact {share:.3f}{interval} of {len(own)}, first token {numbers['first']:.3f}, tokens "
        f"given those before {numbers['forced']:.3f}, {numbers['nats']:.2f} nats an answer."
    )


def _control(answers: Sequence[Answer], condition: str) -> Line:
    """A control must not be right more often than by guessing; beside it, what was written."""
    own = _counted(answers, condition)
    p = min(_above(own, "exact"), _above(own, "first"))
    text = _recall(own) + (
        " That is guessing, as it must be."
        if p > _SURE
        else f" That is more than guessing (p = {p:.1g}): the answers come from somewhere else "
        "than what this memory was told."
    )
    difference = _against(answers, own)
    if difference:
        text += (
            f" Written: {difference['exact']:+.3f}{difference.pop('interval')} exact over "
            f"{difference['pairs']} pairs (McNemar p = {difference['mcnemar_p']:.1g}), "
            f"{0 - difference['nats']:+.2f} nats an answer."
        )
    return Line(
        section="origin",
        name=f"recall, {condition}",
        verdict=judged(p > _SURE),
        text=text,
        numbers=_numbers(own) | {"p": p, "written against it": difference},
    )


def _above(answers: Sequence[Answer], field: Literal["exact", "first"]) -> float:
    """How likely guessing is right so often, from the binomial distribution."""
    right = sum(getattr(one, field) for one in answers)
    chance = answers[0].chance if field == "exact" else answers[0].first_chance
    return float(binomtest(right, len(answers), chance, alternative="greater").pvalue)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """The two-sided exact p-value that paired answers of two conditions are right equally often.

    Args:
      first: bool `[answers]`, whether each answer of one condition is right.
      second: the same questions' answers of the other condition.

    References: McNemar 1947, "Note on the sampling error of the difference between correlated
    proportions or percentages"; exact, from the binomial distribution of the answers that differ.
    """
    only_first = int(np.sum(first & ~second))
    only_second = int(np.sum(~first & second))
    differing = only_first + only_second
    return float(binomtest(only_first, differing).pvalue) if differing else 1.0


def _against(answers: Sequence[Answer], control: Sequence[Answer]) -> dict[str, Any]:
    """Written less a control, paired by question; empty if no question has both."""
    theirs = {(one.run, one.document, one.question): one for one in control}
    pairs = [
        (one, theirs[key])
        for one in _counted(answers, "written")
        if (key := (one.run, one.document, one.question)) in theirs
    ]
    if not pairs:
        return {}
    ours = np.array([one.exact for one, _ in pairs])
    other = np.array([one.exact for _, one in pairs])
    gap, interval = _share([one for one, _ in pairs], ours.astype(float) - other.astype(float))
    return {
        "exact": gap,
        "interval": interval,
        "pairs": len(pairs),
        "mcnemar_p": mcnemar(ours, other),
        "nats": float(np.mean([two.nats - one.nats for one, two in pairs])),
    }


def _by_reach(answers: Sequence[Answer]) -> str:
    """How many values lie within a window or in the chunk that was not written yet."""
    own = _of(answers, "written")
    inside = [one for one in own if one.reach is not None and one.distance <= one.reach]
    waiting = [one for one in own if not one.written]
    bound = own[0].reach
    reach = "without bound" if bound is None else f"{bound} tokens back"
    kept = _counted(answers, "frozen, caches kept")
    beyond = [one for one in kept if one.reach is None or one.distance > one.reach]
    text = (
        f"Mixers look {reach}: {len(inside)} of {len(own)} values lie within. {len(waiting)} stand "
        "in a chunk that was not written yet, and do not count."
    )
    if beyond:
        share = float(np.mean([one.exact for one in beyond]))
        text += f" With caches kept and writing disabled {share:.3f} beyond it are answered."
    return text
