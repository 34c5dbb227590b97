"""Does it remember? Facts far behind the attention window, and numbers hidden in books."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.needles import HALF, OPEN, shares, shares_by_seed, trainings
from lab.findings.stored import lines_of, markdown, over_seeds, share_over_seeds


def facts_by_training(run: str, way: str, name: str = "shipped_cpu.jsonl") -> list[float]:
    """Share of facts that a shipped config answers, its memory written or frozen."""
    return [
        line["recall"][way]["accuracy"]
        for line in lines_of(name)
        if line["run"].partition(":")[0] == run
    ]


def _frozen(model: str) -> list[float]:
    return [
        run["accuracy"]
        for line in lines_of("study_cpu.jsonl")
        if line["run"].partition(":")[0] == model
        for run in line["needle_frozen"]
        if run["words"] == 56
    ]


def answer() -> str:
    written = 100 * share_over_seeds(facts_by_training("recall", "writing")).mean
    frozen = 100 * share_over_seeds(facts_by_training("recall", "frozen")).mean
    once, four = (
        share_over_seeds(shares(OPEN, "needle_1x", readings=readings)) for readings in (1, 4)
    )
    return (
        f"Yes: a model whose attention sees 32 tokens answers {written:.1f} % of facts that were"
        f" stated 96 to 255 tokens earlier, and {frozen:.1f} % (a guess) if writing is disabled.\n"
        f"Reading again helps: of numbers hidden in book text it answers {once.mean:.2f} after one"
        f" reading and {four.mean:.2f} after four."
    )


def _frozen_open() -> list[float]:
    """As `_frozen`, of models whose gates start open."""
    lines = lines_of("other_words_cpu.jsonl")
    return [line["exact"] / line["samples"] for line in lines if line["readings"] == 0]


def _rows() -> list[tuple[str, list[float], list[float] | None]]:
    def needles(model: str, length: str, readings: int) -> list[float]:
        return shares_by_seed(model, f"needle_{length}", readings=readings)

    carried = "recall_carried"
    return [
        (
            "facts, a new memory for each sequence",
            facts_by_training("recall", "writing"),
            facts_by_training("recall", "frozen"),
        ),
        (
            "facts, one memory carried from step to step",
            facts_by_training(carried, "writing"),
            facts_by_training(carried, "frozen"),
        ),
        (
            "numbers in 500 bytes, gates initialised open, 1 reading",
            needles(OPEN, "1x", 1),
            _frozen_open(),
        ),
        ("the same, 4 readings", needles(OPEN, "1x", 4), None),
        ("numbers in 7,500 bytes, initialised open, 4 readings", needles(OPEN, "15x", 4), None),
        (
            "numbers in 500 bytes, gates initialised at a half, 1 reading",
            needles(HALF, "1x", 1),
            _frozen(HALF),
        ),
        ("the same, 4 readings", needles(HALF, "1x", 4), None),
        (
            "numbers in 7,500 bytes, initialised at a half, 4 readings",
            needles(HALF, "15x", 4),
            None,
        ),
    ]


def table() -> str:
    found = []
    for name, written, frozen in _rows():
        digits = ".3f" if name.startswith("facts") else ".2f"
        last = f"{share_over_seeds(frozen):{digits}}" if frozen else ""
        if frozen and max(frozen) == 0:
            last = f"0 in {len(frozen)} seed{'s' * (len(frozen) > 1)}"
        cells = [str(len(written)), f"{share_over_seeds(written):{digits}}", last]
        found.append([name, *cells])
    return markdown(["asked for", "seeds", "right, memory written", "memory frozen"], found)


def draw() -> Figure:
    names = [
        "facts, a new memory\nper sequence",
        "facts, one memory\ncarried",
        "gates open:\n500 bytes, read once",
        "500 bytes, four times",
        "7,500 bytes, four times",
        "gates at a half:\n500 bytes, read once",
        "500 bytes, four times",
        "7,500 bytes, four times",
    ]
    found = _rows()
    figure, (axis,) = drawing.new_figure(4.6)
    drawing.rows(axis, names, [one[1] for one in found], name="memory written")
    drawing.rows(
        axis,
        names,
        [one[2] or [] for one in found],
        color=drawing.ORANGE,
        hollow=True,
        name="memory frozen",
    )
    axis.set_xlim(-0.03, 1.03)
    axis.axhline(1.5, color=drawing.GREY, linewidth=0.8)
    drawing.label(axis, x="share of answers that are right; a point is a seed")
    drawing.legend(figure, axis)
    return figure


def _gates() -> tuple[list[float], list[float]]:
    """Mean gate at the digits of numbers, and in text, of each training."""
    at: tuple[list[float], list[float]] = ([], [])
    for line in trainings():
        if line["run"].partition(":")[0] == HALF and "gates" in line:
            (places,) = line["gates"].values()
            at[0].append(min(places[place]["mean"] for place in ("stated", "answers")))
            at[1].append(places["text"]["mean"])
    return at


def perplexities(model: str, name: str) -> list[float]:
    """Of unseen books, per byte, a memory written while they are read, by training."""
    lines = lines_of(name)
    return [x["ppl"]["writing"] for x in lines if x["run"].partition(":")[0] == model]


def notes() -> str:
    digits, text = _gates()
    half, backbone = (
        float(np.mean(perplexities(model, "study_cpu.jsonl"))) for model in (HALF, "gdn_swa")
    )
    second = [np.log(perplexities(x, "study_second_cpu.jsonl")) for x in (OPEN, HALF)]
    open_cost = over_seeds(second[0] - second[1])
    once = sorted(shares(HALF, "needle_1x", readings=1))
    asked = [line["facts"]["told"]["exact"] for line in lines_of("zero_shot_cpu.jsonl")]
    return "\n".join(
        [
            "- The models were trained to answer, with the sentence that is asked"
            f" ([Does it generalise?](generalise.md)). {len(asked)} models of plain text answer"
            f" {sum(asked) * 100:.0f} of 100 facts each.",
            f"- With gates initialised at a half some of the {len(once)} trainings stay weak"
            f" ({once[0]:.2f} after one reading, the best {once[-1]:.2f}). Three seeds were trained"
            " on two machines each, and which seed stays weak changes with the machine. Initialise"
            f" gates open (`gate_bias=2`): loss of text here {open_cost:+.3f} nats.",
            f"- The price of answering is larger: perplexity of text {half:.2f} per byte with the"
            f" memory, {backbone:.2f} for the same backbone, which cannot answer.",
            "- The gate is open where the memory is needed: at least"
            f" {min(digits):.2f} at the digits, {min(text):.2f} to {max(text):.2f} in other text"
            " (three seeds, each trained twice).",
        ]
    )


def facts() -> tuple[float, float]:
    """Shares of facts that the default answers, with its memory written and frozen."""
    return (
        share_over_seeds(facts_by_training("recall", "writing")).mean,
        share_over_seeds(facts_by_training("recall", "frozen")).mean,
    )


def readme() -> list[list[str]]:
    """Rows of README's table: what was measured, with the memory, without."""
    once, four = (
        share_over_seeds(shares(OPEN, "needle_1x", readings=readings)) for readings in (1, 4)
    )
    half = [
        share_over_seeds(shares_by_seed(HALF, "needle_1x", readings=readings))
        for readings in (1, 4)
    ]
    facts = share_over_seeds(facts_by_training("recall", "writing"))
    without = share_over_seeds(facts_by_training("recall", "frozen"))
    return [
        ["facts stated 96 to 255 tokens earlier", f"{facts:.3f}", f"{without:.3f}"],
        [
            "numbers in a text, after one and four readings; gates initialised open",
            f"{once:.2f}, {four:.2f}",
            f"{max(_frozen_open()):.2f}",
        ],
        [
            "the same, gates initialised at a half; three seeds, each trained twice",
            f"{half[0]:.2f}, {half[1]:.2f}",
            f"{max(_frozen(HALF)):.2f}",
        ],
    ]
