"""What makes lookup general? First digits in sentences that no training had, by recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.stored import (
    Estimate,
    Line,
    lines_of,
    markdown,
    over_books_and_seeds,
    over_seeds,
)
from lab.study.lookup.texts import HELD_OUT, link_of

LINES = "lookup_cpu.jsonl"
SPANS = "spans"
RECIPES = ("1", "4", "16", "64", SPANS)
GUESS = 1 / 4 + 3 / 4 / 10
"""Share of first digits that one of the four numbers of a row, drawn at random, has right."""
FIRST, LATER, EXACT, NATS = range(4)
NOT_MEASURED = "-"


class Curve(NamedTuple):
    """A way to answer: its name, the kind of training, and the way to read."""

    name: str
    kind: str
    way: str


CURVES = (
    Curve("FwPKM, written", "fwpkm", "written"),
    Curve("FwPKM, frozen", "fwpkm", "frozen"),
    Curve("exact neighbours", "fwpkm", "neighbours"),
    Curve("matrix, 72 kB", "matrix", "read"),
    Curve("full attention", "attention", "read"),
)
WRITTEN, FROZEN, NEIGHBOURS, MATRIX, ATTENTION = CURVES
UNGATED = Curve("FwPKM without a gate", "ungated", "written")
UNGATED_NEIGHBOURS = Curve("exact neighbours, trained without a gate", "ungated", "neighbours")
PKM_ABOVE = Curve("FwPKM, PKM above", "pkm_above", "written")
PKM_ABOVE_NEIGHBOURS = Curve("exact neighbours, PKM above", "pkm_above", "neighbours, gates open")
OPEN = Curve("FwPKM, all gates open", "fwpkm", "gates open")
OPEN_NEIGHBOURS = Curve("exact neighbours, all gates open", "fwpkm", "neighbours, gates open")


def runs(
    curve: Curve, recipe: str, words: str = "held out", given: str | None = None
) -> list[Line]:
    """The models of a curve by seed: trained by the program, or one that was given to it."""
    asked = {"kind": curve.kind, "way": curve.way, "recipe": recipe, "words": words}
    asked |= {"given": given}
    found = [x for x in lines_of(LINES) if all(x[name] == asked[name] for name in asked)]
    return sorted(found, key=lambda line: line["seed"])


def estimate(
    curve: Curve,
    recipe: str,
    words: str = "held out",
    *,
    given: str | None = None,
    score: int = FIRST,
) -> Estimate | None:
    """Over books and trainings; of one training, over its books; None if it was not measured."""
    found = [np.array(line["by_book"])[:, score] for line in runs(curve, recipe, words, given)]
    if not found:
        return None
    of = over_books_and_seeds(np.array(found)) if len(found) > 1 else over_seeds(found[0])
    return of if score == NATS else of.clipped(0.0, 1.0)


def given() -> list[tuple[str, str]]:
    """Recipe and folder of each model that was trained elsewhere, fewest sentences first."""
    found = {(x["recipe"], x["given"]) for x in lines_of(LINES) if x["given"]}
    return sorted(found, key=lambda one: int(one[0]))


def _cell(found: Estimate | None, form: str = ".2f") -> str:
    return NOT_MEASURED if found is None else format(found, form)


def table() -> str:
    """First digits in new words; a row for each recipe, and one for each model that was given."""
    rows = []
    for recipe in RECIPES:
        rows.append([*_cells("none, spans repeated" if recipe == SPANS else recipe, recipe, None)])
    for recipe, folder in given():
        rows.append([*_cells(f"{recipe}, {_weights(folder)}M weights", recipe, folder)])
    head = ["sentences of training", "FwPKM, written (gates open)", "without a gate"]
    head += ["exact neighbours (gates open)", MATRIX.name, ATTENTION.name]
    return markdown(head, rows)


def _cells(name: str, recipe: str, folder: str | None) -> Iterator[str]:
    opened = {WRITTEN: OPEN, NEIGHBOURS: OPEN_NEIGHBOURS}
    yield name
    for curve in (WRITTEN, UNGATED, NEIGHBOURS, MATRIX, ATTENTION):
        cell = _cell(estimate(curve, recipe, given=folder))
        more = estimate(opened[curve], recipe, given=folder) if curve in opened else None
        yield cell if more is None else f"{cell} ({more.mean:.2f})"


def _weights(folder: str) -> str:
    weights = next(x["weights"] for x in lines_of(LINES) if x["given"] == folder)
    return f"{weights / 1e6:.1f}"


def by_link(curve: Curve, recipe: str, folder: str | None = None) -> dict[int, float]:
    """Share of right first digits by the bytes between key and number."""
    found = np.mean(
        [np.array(x["by_sentence"])[:, FIRST] for x in runs(curve, recipe, given=folder)], axis=0
    )
    links = np.array([link_of(sentence) for sentence in HELD_OUT])
    return {int(link): float(found[links == link].mean()) for link in np.unique(links)}


def answer() -> str:
    trained = [recipe for recipe in RECIPES if runs(WRITTEN, recipe)]
    found = [_mean(WRITTEN, recipe, None) for recipe in trained]
    assert max(found) < GUESS, "more sentences help: say so"
    opened = [_mean(OPEN_NEIGHBOURS, recipe, None) for recipe in trained if recipe != SPANS]
    gates = np.array([runs(WRITTEN, recipe)[0]["gates"] for recipe in trained if recipe != SPANS])
    weights = runs(WRITTEN, trained[0])[0]["weights"]
    return (
        f"More training sentences, up to 64, do not: with {weights / 1e6:.1f}M weights FwPKM finds"
        f" {min(found):.2f} to {max(found):.2f} of the first digits in new words, where guessing a"
        " digit finds 0.10.\n"
        "The queries are good enough, but the gate suppresses the read: exact neighbours of the"
        f" same queries, with all gates open, find {min(opened):.2f} to {max(opened):.2f}, and the"
        f" gate is {gates[:, 0].min():.2f} to {gates[:, 0].max():.2f} before a first digit."
    )


def notes() -> str:
    """What else was trained and asked, a line each."""
    gates = np.array([runs(WRITTEN, recipe)[0]["gates"] for recipe in RECIPES if recipe != SPANS])
    without = "; ".join(
        f"{_said(recipe)}: {_mean(UNGATED, recipe, None):.2f}, exact neighbours"
        f" {_mean(UNGATED_NEIGHBOURS, recipe, None):.2f}"
        for recipe in RECIPES
        if runs(UNGATED, recipe)
    )
    slow = "; ".join(
        f"{_said(recipe)}: {_mean(PKM_ABOVE, recipe, None):.2f}, exact neighbours with open gates"
        f" {_mean(PKM_ABOVE_NEIGHBOURS, recipe, None):.2f}"
        for recipe in RECIPES
        if runs(PKM_ABOVE, recipe)
    )
    return (
        f"- Before later digits the gate is {gates[:, 1].min():.2f} to {gates[:, 1].max():.2f}: the"
        " model completes a number once its first digit is given.\n"
        f"- Models that were trained without a gate: {without}.\n"
        f"- With a slow memory (PKM) above FwPKM: {slow}."
    )


def _mean(curve: Curve, recipe: str, folder: str | None, words: str = "held out") -> float:
    found = estimate(curve, recipe, words, given=folder)
    assert found is not None, f"{curve.name}, {recipe}, {words} was not measured"
    return found.mean


def _said(recipe: str) -> str:
    if recipe == SPANS:
        return "spans repeated"
    return "one sentence" if recipe == "1" else f"{recipe} sentences"


def results() -> str:
    """Every model and way to read, in detail."""
    rows = []
    trained = (UNGATED, UNGATED_NEIGHBOURS, PKM_ABOVE, MATRIX, ATTENTION)
    for curve in (*(WRITTEN, FROZEN, OPEN, OPEN_NEIGHBOURS), *trained):
        # Frozen memories answer alike: the fewest and the most sentences stand for all recipes.
        for recipe in RECIPES[:4:3] if curve is FROZEN else RECIPES:
            if runs(curve, recipe):
                rows.append(_detail(f"{curve.name}, {_said(recipe)}", curve, recipe, None))
    for recipe, folder in given():
        for curve in (WRITTEN, FROZEN, OPEN, OPEN_NEIGHBOURS):
            name = f"{curve.name}, {_said(recipe)}, {_weights(folder)}M weights"
            rows.append(_detail(name, curve, recipe, folder))
    links = ", ".join(map(str, by_link(WRITTEN, RECIPES[0])))
    head = ["", "first digit, own words", f"new words, by bytes from key to number: {links}"]
    head += [
        "later digits, new words",
        "nats of six digits",
        "gate: first digit, later, text",
    ]
    return markdown(head, rows)


def _detail(name: str, curve: Curve, recipe: str, folder: str | None) -> list[str]:
    links = ", ".join(f"{x:.2f}" for x in by_link(curve, recipe, folder).values())
    gates = [x["gates"] for x in runs(curve, recipe, given=folder) if x["gates"]]
    gate = ", ".join(f"{x:.2f}" for x in np.mean(gates, axis=0)) if gates else NOT_MEASURED
    return [
        name,
        _cell(estimate(curve, recipe, "trained", given=folder)),
        links,
        _cell(estimate(curve, recipe, given=folder, score=LATER)),
        _cell(estimate(curve, recipe, given=folder, score=NATS), ".1f"),
        gate if curve in (WRITTEN, PKM_ABOVE) else NOT_MEASURED,
    ]


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(4.0)
    shown = {
        WRITTEN: (drawing.BLUE, "-"),
        UNGATED: (drawing.GREEN, "-"),
        OPEN: (drawing.BLUE, ":"),
        FROZEN: (drawing.GREY, "--"),
        OPEN_NEIGHBOURS: (drawing.ORANGE, "-"),
        MATRIX: (drawing.VIOLET, "-"),
        ATTENTION: (drawing.INK, "-"),
    }
    numbers = [recipe for recipe in RECIPES if recipe != SPANS]
    for place, (curve, (color, style)) in enumerate(shown.items()):
        aside = 0.05 * (place - 2)
        points = {recipe: estimate(curve, recipe) for recipe in (*numbers, SPANS)}
        known = [(at, one) for at, recipe in enumerate(numbers) if (one := points[recipe])]
        name: str | None = curve.name
        if known:
            at, found = [x + aside for x, _ in known], [x.mean for _, x in known]
            axis.plot(at, found, style, color=color, marker="o", label=name)
            name = None
        spread = [*known, *((len(numbers), x) for x in [points[SPANS]] if x)]
        for at, found in spread:
            axis.plot(2 * [at + aside], [found.low, found.high], color=color, linewidth=1)
        if last := points[SPANS]:
            where = [len(numbers) + aside]
            axis.plot(where, [last.mean], "o", color=color, label=name)
    for recipe, folder in given():
        for curve in (WRITTEN, OPEN, OPEN_NEIGHBOURS):
            found = estimate(curve, recipe, given=folder)
            if found and recipe in numbers:
                color, at = shown[curve][0], numbers.index(recipe) + 0.05 * [*shown].index(curve)
                hollow = "none" if curve is OPEN else color
                axis.plot([at], [found.mean], "s", color=color, markerfacecolor=hollow)
                axis.plot(2 * [at], [found.low, found.high], color=color, linewidth=1)
    axis.axhline(GUESS, color=drawing.GREY, linewidth=1, linestyle=":")
    about = {"color": drawing.GREY, "fontsize": 9.5, "va": "bottom", "ha": "right"}
    axis.text(len(numbers) + 0.4, GUESS + 0.01, "one of the row's four numbers at random", **about)
    axis.set_xticks(range(len(numbers) + 1), [*numbers, "none:\nspans repeated"])
    axis.set_xlim(-0.4, len(numbers) + 0.45)
    axis.set_ylim(0, 1.02)
    axis.grid(axis="y", color=drawing.GRID, linewidth=0.8)
    drawing.label(axis, x="sentences that training had", y="first digit right, new words")
    drawing.legend(figure, axis, columns=2)
    return figure
