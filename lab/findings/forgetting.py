"""What lasts? Facts after other text and after other facts, by the write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from lab.findings import drawing
from lab.findings.stored import (
    Estimate,
    Line,
    document_of,
    lines_of,
    markdown,
    over_books_and_seeds,
    over_seeds,
    share_over_seeds,
)

FILES = {
    "open": "retention_open_cpu.jsonl",
    "half": "retention_gated_cpu.jsonl",
    "again": "retention_neighbours_cpu.jsonl",
}
"""Lines by trainings; "again" is one from open gates that was trained once more."""
UNREAD = "retention_unread_cpu.jsonl"
"""Orders of domains of that one, each without another domain."""
UNREAD_PLAIN_TEXT = "retention_unread_plain_text_cpu.jsonl"
"""The same of models of plain text."""
PLAIN, STILL, RELOCATED = "plain", "keys still", "keys still, relocation 1"
SMALL = "keys still, relocation 1, replay 512, 4 inner steps"
LARGE = "keys still, relocation 1, replay 2048, 4 inner steps"
HARDENED = "keys still, hardening 1, 6 inner steps"
STORE_SMALL, STORE_LARGE = "neighbours, strongest 512", "neighbours, strongest 2048"
"""Exact neighbours over the tokens that these replays keep."""
STORE_LAST, STORE_ALL = "neighbours, last 2048", "neighbours, all"
TEXT, FACTS = "text_30", "facts_10"
"""Moments after 30 pieces of other text, and after 10 haystacks with five other facts each."""
_ROWS = (
    *(("open", PLAIN), ("open", STILL), ("open", RELOCATED), ("open", SMALL), ("open", HARDENED)),
    *(("again", STORE_LARGE), ("half", PLAIN), ("half", LARGE)),
)


def _lines(gates: str, method: str) -> list[Line]:
    lines = lines_of(FILES[gates])
    found = [one for one in lines if (one["measure"], one["method"]) == ("facts", method)]
    return sorted(found, key=lambda line: line["run"])


def lost(gates: str, method: str, moment: str) -> np.ndarray:
    """Share of the answers that were right after four readings and no longer are, by training."""
    facts = [line["facts"] for line in _lines(gates, method)]
    return np.array([one["told"]["exact"] - one[moment]["exact"] for one in facts])


def minus_plain(gates: str, method: str, moment: str) -> Estimate:
    """What a write loses minus what the default write loses, over the trainings."""
    return over_seeds(lost(gates, method, moment) - lost(gates, PLAIN, moment))


def kept(gates: str, method: str, moment: str) -> np.ndarray:
    """Share of all questions that are answered at a moment, by training."""
    return np.array([line["facts"][moment]["exact"] for line in _lines(gates, method)])


def times_plain(method: str) -> float:
    """CPU time of reading and writing eight rows, relative to the default write."""
    gates = "again" if method.startswith("neighbours") else "half"
    lines = [line for line in lines_of(FILES[gates]) if line["measure"] == "cost"]
    spent = {line["method"]: line["cpu_milliseconds"] for line in lines}
    return spent[method] / spent[PLAIN]


def domains(method: str) -> tuple[Estimate, Estimate]:
    """Gain in nats right after a domain was read, and what is lost of it in the end.

    Both are means over the five domains of each order that others follow, over three orders and
    the trainings of models of plain text.
    """
    lines = lines_of("retention_plain_text_cpu.jsonl")
    own = [one for one in lines if (one["measure"], one["method"]) == ("domains", method)]
    runs = sorted({one["run"] for one in own})

    def over(values: str) -> Estimate:
        return over_seeds(
            [
                float(np.mean([_means(line["change"][values]) for line in own if line["run"] == x]))
                for x in runs
            ]
        )

    gain = over("own")
    return Estimate(-gain.mean, -gain.high, -gain.low), over("forgetting")


class Unread(NamedTuple):
    """Gains in nats on domains that a memory read and on those that it did not.

    Attributes:
      domains: their names.
      read: `[trainings, domains]`, of a domain just read, over the orders that have it.
      never: of a domain left unread, at the moments at which another was just read.
    """

    domains: tuple[str, ...]
    read: np.ndarray
    never: np.ndarray

    @property
    def seeds(self) -> int:
        """How many models there are."""
        return len(self.read)

    @property
    def difference(self) -> Estimate:
        """With an interval over the domains, and over trainings if there are several."""
        found = self.read - self.never
        return over_books_and_seeds(found) if len(found) > 1 else over_seeds(found[0])

    @property
    def higher(self) -> int:
        """Pairs of domain and training that gain more where the domain is read."""
        return int((self.read > self.never).sum())

    @property
    def largest(self) -> tuple[str, float]:
        """The domain that gains most by being read, and the mean difference of the others."""
        of_domain = (self.read - self.never).mean(axis=0)
        most = int(of_domain.argmax())
        return self.domains[most], float(np.delete(of_domain, most).mean())


def unread(name: str = UNREAD, method: str = PLAIN) -> Unread:
    """Gains of each domain, of lines whose orders leave another domain out each."""
    lines = [line for line in lines_of(name) if line["method"] == method]
    domains = sorted({one for line in lines for one in line["change"]["unread"]})
    trainings = sorted({line["run"] for line in lines})
    of = [_gains([x["change"] for x in lines if x["run"] == run], domains) for run in trainings]
    read, never = np.array(of).swapaxes(0, 1)
    return Unread(tuple(domains), read, never)


def _gains(changes: Sequence[Line], domains: Sequence[str]) -> tuple[list[float], list[float]]:
    """Mean gains of one training on each domain where it is read, and where it is not."""
    read: dict[str, list[float]] = {}
    never: dict[str, list[float]] = {}
    for change in changes:
        for domain, (mean, *_) in zip(change["domains"], change["own"], strict=True):
            read.setdefault(domain, []).append(-mean)
        for domain, moments in zip(change["unread"], change["unread_changes"], strict=True):
            never.setdefault(domain, []).extend(-mean for mean, *_ in moments)
    with_reading, without = ([float(np.mean(x[y])) for y in domains] for x in (read, never))
    return with_reading, without


def _means(domains: Sequence[Sequence[float]]) -> float:
    """Of the first five domains of an order; nothing follows the sixth."""
    return float(np.mean([mean for mean, *_ in domains[:5]]))


def text_cost(models: str, method: str) -> Estimate:
    """Loss of unseen books minus the default write's, over books and seeds."""
    files = FILES | {"plain text": "retention_plain_text_cpu.jsonl"}
    lines = [line for line in lines_of(files[models]) if line["measure"] == "text"]
    plain = {line["run"]: line["text"] for line in lines if line["method"] == PLAIN}
    own = {line["run"]: line["text"] for line in lines if line["method"] == method}
    of = [np.subtract(own[run]["losses"], plain[run]["losses"]) for run in sorted(own)]
    return over_books_and_seeds(np.array(of))


def by_gradient() -> float:
    """The largest share of facts that gradient steps on the weights taught any model."""
    lines = [x for x in lines_of("facts_by_gradient_cpu.jsonl") if "pkm_fwpkm" not in x["run"]]
    return max(line["facts"]["told"]["exact"] for line in lines)


def in_frozen_backbone() -> list[float]:
    """Share of facts left after 30 conversations, by training."""
    rows = document_of("lasting_text_cpu.json")["rows"]
    return [row["exact"] for row in rows if row["conversations"] == 30]


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def answer() -> str:
    plain, small = (kept("open", method, FACTS) for method in (PLAIN, SMALL))
    before = kept("open", SMALL, "told").mean()
    return (
        "Little, with the default write: after fifty new facts the model recalls"
        f" {plain.mean():.2f} of the old ones.\n"
        "With frozen keys, relocation, replay and four inner steps"
        f" it recalls {small.mean():.2f}, of {before:.2f} before, and learns new facts as well, for"
        f" {times_plain(SMALL):.1f} times the time."
    )


def _shown(write: str) -> str:
    """A write as the page calls it."""
    return "default" if write == PLAIN else write.replace("keys still", "frozen keys")


def table() -> str:
    names = {"open": "open", "half": "at a half", "again": "open, one seed"}
    stores = {STORE_LARGE: "none: exact neighbours of the tokens that replay 2048 keeps"}
    rows = []
    for gates, method in _ROWS:
        cells = [names[gates], _shown(stores.get(method, method))]
        cells += [
            f"{share_over_seeds(lost(gates, method, TEXT)):.2f}",
            f"{share_over_seeds(lost(gates, method, FACTS)):.2f}",
            f"{kept(gates, method, 'new_1').mean():.2f}",
            f"{times_plain(method):.1f}",
        ]
        rows.append(cells)
    head = ["gates initialised", "write", "lost after 30 texts", "lost after 50 other facts"]
    return markdown([*head, "new facts, told once", "time"], rows)


def notes() -> str:
    def against(gates: str, method: str, moment: str) -> str:
        return f"{minus_plain(gates, method, moment):+.2f}"

    plain, hardened = domains(PLAIN), domains(HARDENED)
    return "\n".join(
        [
            "- Minus the default write, over three seeds: with gates initialised open"
            f" {against('open', SMALL, FACTS)} of the facts are lost among other facts, and frozen"
            f" keys lose {against('open', STILL, TEXT)} in text. With gates initialised at a half"
            f" the same differences are {against('half', LARGE, FACTS)} (replay of 2,048) and"
            f" {against('half', STILL, TEXT)}: seeds differ too much to say more.",
            _neighbours(),
            "- Domains of text (models of plain text): the default write gains"
            f" {plain[0]:.4f} nats on a domain that others follow and loses {plain[1]:.4f} of it;"
            f" hardening 1 with six inner steps gains {hardened[0]:.4f} and loses"
            f" {hardened[1]:.4f}.",
            _unread(),
            "- Text costs little: minus the default write, the write with replay of 512 changes the"
            f" loss of unseen books by {text_cost('half', SMALL):+.4f} nats per byte. Hardened"
            f" slots cost models of plain text {text_cost('plain text', HARDENED):+.4f}.",
            f"- Ordinary gradient steps on the model's weights answer {100 * by_gradient():.0f} of"
            " 100 facts that are stated once. In the models with a frozen backbone the default"
            f" write leaves {_range(in_frozen_backbone())} of the facts after 30 conversations.",
        ]
    )


def _unread() -> str:
    plain, hardened = (unread(UNREAD_PLAIN_TEXT, method) for method in (PLAIN, HARDENED))
    needles = unread()
    most, others = plain.largest

    def brief(of: Unread) -> str:
        return f"{of.read.mean():+.4f} and {of.never.mean():+.4f}, difference {of.difference:+.4f}"

    return (
        f"- Domains left unread, each once: {models(plain.seeds)} of plain text, trained again,"
        f" gain {plain.read.mean():+.4f} nats with the default write on a domain just read, and"
        f" {plain.never.mean():+.4f} on the unread one at the same moments, which is what reading"
        f" any text gives. {difference(plain)} (without {most} {others:+.4f}). Hardening 1 with six"
        f" inner steps, {models(hardened.seeds)}: {brief(hardened)}. One model trained with"
        f" needles, gates initialised open: {brief(needles)}."
    )


def difference(of: Unread) -> str:
    """What a domain gains by being read, beyond what others give it, and what this shows."""
    shown = "shows" if of.difference.low > 0 else "is too uncertain to show"
    return (
        f"The difference, {of.difference:+.4f}, above zero in {of.higher} of {of.read.size} pairs"
        f" of domain and seed, {shown} adaptation to the domain that is read"
    )


def models(number: int) -> str:
    """How many models, in words where there is one."""
    return "one model" if number == 1 else f"{number} models"


def _neighbours() -> str:
    def of(method: str, moment: str = FACTS) -> str:
        return f"{lost('again', method, moment).mean():.2f}"

    return (
        "- Exact neighbours in the table's place (one seed, with which the default write loses"
        f" {of(PLAIN)} among other facts): over the tokens that replay of 512 keeps they lose"
        f" {of(STORE_SMALL)} and the write with that replay {of(SMALL)}, of 2,048"
        f" {of(STORE_LARGE)} and {of(LARGE)}. A store of the last 2,048 tokens loses"
        f" {of(STORE_LAST)}, in text as well ({of(STORE_LAST, TEXT)}); one of all tokens"
        f" {of(STORE_ALL)}. A fact stated four times takes four entries in a store"
        " and in a replay."
    )


def draw() -> Figure:
    names = {
        PLAIN: "default",
        STILL: "frozen keys",
        RELOCATED: "+ relocation",
        SMALL: "+ replay 512,\n4 inner steps",
        LARGE: "+ replay 2048,\n4 inner steps",
        HARDENED: "frozen keys,\nhardening",
    }
    figure, axes = drawing.new_figure(3.9, columns=2)
    titles = {TEXT: "after 30 texts", FACTS: "after 50 other facts"}
    for axis, (moment, title) in zip(axes, titles.items(), strict=True):
        open_, half = ([lost(gates, one, moment) for one in names] for gates in ("open", "half"))
        drawing.rows(axis, list(names.values()), open_, name="gates initialised open", offset=-0.12)
        drawing.rows(
            axis,
            list(names.values()),
            half,
            color=drawing.ORANGE,
            hollow=True,
            name="at a half",
            offset=0.12,
        )
        axis.set_xlim(-0.05, 1.03)
        axis.set_title(title, fontsize=11, color=drawing.INK)
    axes[1].set_yticklabels([])
    figure.supxlabel("share of the known facts that is lost", fontsize=10.5, color=drawing.INK)
    drawing.legend(figure, axes[0])
    return figure
