"""Does it lower the loss of text? Unseen books, read once and again, beside the same backbone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.needles import HALF
from lab.findings.stored import (
    Line,
    lines_of,
    markdown,
    over_books_and_seeds,
    over_seeds,
    resampled,
)

LINES = "plain_text_cpu.jsonl"
SHORT, LONG = 400, 4883
"""Steps of training: 1.6 MB and 20 MB."""
SECTIONS = {
    "first": "the first 512 bytes",
    "later": "first reading, from 8 kB on",
    "again": "second reading, from 8 kB on",
}
_AT = {"first": 0, "later": 3, "again": 7}


def _runs(kind: str, steps: int) -> list[Line]:
    """The trainings of a kind at the rate that was chosen, by seed."""
    found = [
        line
        for line in lines_of(LINES)
        if (line["kind"], line["steps"], line["rate"], line["extra"]) == (kind, steps, 0.004, [])
    ]
    return sorted(found, key=lambda line: line["seed"])


def difference(steps: int, section: str, way: str = "writing", of: str = "backbone") -> np.ndarray:
    """FwPKM's loss minus another, nats `[trainings, books]`.

    Args:
      steps: of the training.
      section: of the books, a key of `SECTIONS`.
      way: in which FwPKM reads, `writing` or `frozen`.
      of: `backbone`, or `frozen` for the same model.
    """
    ours = _runs("fwpkm", steps)
    theirs = _runs("backbone", steps) if of == "backbone" else ours
    assert [one["seed"] for one in ours] == [one["seed"] for one in theirs]
    return np.array(
        [
            np.subtract(one[way][_AT[section]], two["frozen"][_AT[section]])
            for one, two in zip(ours, theirs, strict=True)
        ]
    )


def trained_loss(steps: int) -> np.ndarray:
    """FwPKM's loss minus the backbone's in the last tenth of training, by seed."""
    pairs = zip(_runs("fwpkm", steps), _runs("backbone", steps), strict=True)
    return np.array([one["train_loss"] - two["train_loss"] for one, two in pairs])


def more_weights() -> float:
    """Trained weights of FwPKM's layer as a share of the backbone's."""
    by_run = {line["run"]: line for line in lines_of("retrofit_cpu.jsonl")}
    return by_run["fwpkm:0"]["trained"] / by_run["backbone:0"]["trained"]


def _large(way: str) -> np.ndarray:
    """Loss of each book from the ninth row on, of the first run at 24 million weights."""
    variant = "backbone" if way == "rows" else "fwpkm"
    (line,) = [
        line
        for line in lines_of("real_size_h200.jsonl")
        if line["part"] == "text" and (line["variant"], line["way"]) == (variant, way)
    ]
    return np.array([book[-1] for book in line["nats"]], float)


def _of_needles() -> list[float]:
    """Written minus frozen of the models of needles, by training."""
    lines = lines_of("study_cpu.jsonl")
    return [x["ppl"]["difference"][0] for x in lines if x["run"].startswith(f"{HALF}:")]


def answer() -> str:
    later, again = (over_books_and_seeds(difference(LONG, one)) for one in ("later", "again"))
    assert later.low < 0 < later.high
    sure = again.high < 0
    return (
        "Perhaps a little: after 20 MB of training the loss on unseen books, after the first 8 kB,"
        f" changes by {later:+.4f} nats per byte. With eight books and three seeds this cannot be"
        " told from zero.\n"
        f"At a second reading of the same book it changes by {again:+.4f},"
        f" {'which is' if sure else 'which is not'} statistically significant."
    )


def table() -> str:
    rows = []
    for steps, size in ((SHORT, "1.6 MB"), (LONG, "20 MB")):
        for section in ("later", "again"):
            rows.append(_row(size, SECTIONS[section], "written", difference(steps, section)))
    rows.append(_row("20 MB", SECTIONS["first"], "written", difference(LONG, "first")))
    frozen = difference(LONG, "later", "frozen")
    rows.append(_row("20 MB", SECTIONS["later"], "frozen", frozen))
    large = _large("written") - _large("rows")
    read = "books from 32 kB on, 24M weights"
    counts = f"1 of 1, {(large < 0).sum()} of {len(large)}"
    rows.append(["9 MB", read, "written", f"{resampled(large):+.4f}", counts])
    head = ["training text", "read", "memory", "nats per byte minus the backbone's"]
    return markdown([*head, "lower with seeds, in books"], rows)


def _row(size: str, read: str, memory: str, values: np.ndarray) -> list[str]:
    seeds, books = values.mean(axis=1), values.mean(axis=0)
    counts = f"{(seeds < 0).sum()} of {len(seeds)}, {(books < 0).sum()} of {len(books)}"
    return [size, read, memory, f"{over_books_and_seeds(values):+.4f}", counts]


def notes() -> str:
    books = difference(LONG, "later").mean(axis=0)
    written = over_books_and_seeds(difference(LONG, "later", of="frozen"))
    frozen = over_books_and_seeds(difference(LONG, "later", "frozen"))
    loss = trained_loss(LONG)
    harm = "is" if frozen.low > 0 else "may be"
    return "\n".join(
        [
            f"- One book of the eight contributes {books.min():+.4f}; without it the mean is"
            f" {np.delete(books, books.argmin()).mean():+.4f}. Over the three seeds alone the"
            f" interval is {over_seeds(difference(LONG, 'later').mean(axis=1)):+.4f}: seeds"
            " agree, books do not.",
            f"- On training text, rows of 512 bytes in random order, FwPKM is worse with every"
            f" seed, by {loss.min():.4f} to {loss.max():.4f} nats, with"
            f" {100 * more_weights():.0f} % more trained weights.",
            f"- Within one model, writing against a frozen memory gives {written:+.4f} there."
            f" A part of this {harm} harm that the frozen memory does: against the backbone the"
            f" frozen model's loss is {frozen:+.4f}.",
            "- Models that are trained to answer gain less by writing:"
            f" {over_seeds(_of_needles()):+.4f} over three seeds.",
        ]
    )


def draw() -> Figure:
    names = ["1.6 MB, first reading", "1.6 MB, second", "20 MB, first reading", "20 MB, second"]
    found = [difference(steps, one) for steps in (SHORT, LONG) for one in ("later", "again")]
    figure, (axis,) = drawing.new_figure(3.3)
    books = [1000 * one.mean(axis=0) for one in found]
    drawing.rows(axis, names, books, color=drawing.GREY, hollow=True, name="one of eight books")
    means = [over_books_and_seeds(one) for one in found]
    drawing.rows(axis, names, [[1000 * one.mean] for one in means], name="mean, 95 % interval")
    for at, one in enumerate(means):
        axis.plot([1000 * one.low, 1000 * one.high], [at, at], color=drawing.BLUE, linewidth=1.6)
    axis.axvline(0, color=drawing.INK, linewidth=1)
    drawing.label(axis, x="loss minus the backbone's, 0.001 nats per byte")
    drawing.legend(figure, axis)
    return figure
