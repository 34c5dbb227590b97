"""Where answers come from: what the answers under every condition say, from their records alone.

`audit.asking` makes the records; those of another program can be judged as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from scipy.stats import binomtest

from fwpkm_jax.audit.lines import Line, Verdict, judged
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
_DEPTHS = 5  # Equal parts of the text in the line by depth.


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


def origin_lines(answers: Sequence[Answer]) -> list[Line]:
    """The lines that answers give: accuracies, controls, depth, reach and ways of counting."""
    if not answers:
        return []
    known = [name for name in get_args(Condition) if _counted(answers, name)]
    lines = [_accuracy(answers, name) for name in known]
    if "written" in known:
        lines += [
            _against(answers, name) for name in known if name in CONTROLS and name != "not stated"
        ]
        lines += [_by_depth(answers), _by_reach(answers), _forced(answers)]
    return lines


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


def _accuracy(answers: Sequence[Answer], condition: str) -> Line:
    """A condition's accuracies; a control must not be right more often than by guessing."""
    own = _counted(answers, condition)
    numbers = _numbers(own)
    share, interval = _share(own)
    text = (
        f"Exact {share:.3f}{interval} of {len(own)}, first token {numbers['first']:.3f}, tokens "
        f"given those before {numbers['forced']:.3f}, {numbers['nats']:.2f} nats an answer."
    )
    verdict: Verdict = "told"
    if condition in CONTROLS:
        exact, first = _above(own, "exact"), _above(own, "first")
        good = min(exact, first) > _SURE
        verdict = judged(good)
        text += (
            " That is guessing, as it must be."
            if good
            else f" That is more than guessing (p = {min(exact, first):.1g}): the answers come "
            "from somewhere else than what this memory was told."
        )
        numbers["p"] = min(exact, first)
    return Line(
        section="origin", name=f"recall, {condition}", verdict=verdict, text=text, numbers=numbers
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


def _against(answers: Sequence[Answer], control: str) -> Line:
    """Written against a control, paired: McNemar's test, and the difference over texts and runs."""
    theirs = {(one.run, one.document, one.question): one for one in _counted(answers, control)}
    pairs = [
        (one, theirs[key])
        for one in _counted(answers, "written")
        if (key := (one.run, one.document, one.question)) in theirs
    ]
    ours = np.array([one.exact for one, _ in pairs])
    other = np.array([one.exact for _, one in pairs])
    gap, interval = _share([one for one, _ in pairs], ours.astype(float) - other.astype(float))
    p = mcnemar(ours, other)
    nats = float(np.mean([two.nats - one.nats for one, two in pairs]))
    return Line(
        section="origin",
        name=f"written against {control}",
        verdict="told",
        text=(
            f"{gap:+.3f}{interval} exact over {len(pairs)} pairs (McNemar p = {p:.1g}), "
            f"{nats:+.2f} nats an answer."
        ),
        numbers={"difference": gap, "mcnemar_p": p, "pairs": len(pairs), "nats": nats},
    )


def _by_depth(answers: Sequence[Answer]) -> Line:
    own = _of(answers, "written")
    shares = []
    for part in range(_DEPTHS):
        inside = [one for one in own if min(int(one.depth * _DEPTHS), _DEPTHS - 1) == part]
        low, high = 100 * part // _DEPTHS, 100 * (part + 1) // _DEPTHS
        if inside:
            exact = float(np.mean([one.exact for one in inside]))
            shares.append({"from": low, "to": high, "exact": exact, "answers": len(inside)})
    told = ", ".join(
        f"{part['from']}-{part['to']} %: {part['exact']:.2f} of {part['answers']}"
        for part in shares
    )
    return Line(
        section="origin",
        name="by depth",
        verdict="told",
        text=f"Exact by where in the text the value stands: {told}.",
        numbers={"parts": shares},
    )


def _by_reach(answers: Sequence[Answer]) -> Line:
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
    numbers: dict[str, Any] = {
        "within": len(inside),
        "not_written": len(waiting),
        "values": len(own),
    }
    if beyond:
        share = float(np.mean([one.exact for one in beyond]))
        text += f" With caches kept and writing disabled {share:.3f} beyond it are answered."
        numbers["frozen_caches_kept"] = share
    return Line(
        section="origin", name="what windows cover", verdict="told", text=text, numbers=numbers
    )


def _forced(answers: Sequence[Answer]) -> Line:
    own = _counted(answers, "written")
    exact = float(np.mean([one.exact for one in own]))
    forced = float(np.mean([one.forced for one in own]))
    return Line(
        section="origin",
        name="free against forced",
        verdict="told",
        text=(
            f"{exact:.3f} of the values are generated exactly; {forced:.3f} of their tokens are "
            "likeliest where the right ones before them are given, which is no recall."
        ),
        numbers={"exact": exact, "forced": forced},
    )
