"""Compares ways to write FwPKM by what a memory keeps of facts and of text while it reads on.

    python -m lab.study.study --runs gdn_swa__fwpkm:0   # and :1, :2
    python -m lab.study.retention
    python -m lab.study.retention --tables

The page of results is docs/measurements/forgetting.md. The study's FwPKM models with the paper's
gate were trained with the plain write. Each way to write is measured by facts told, then asked for
again after other text and after other facts (`retention_facts`), and by six domains read one after
the other in several orders (`retention_domains`), for which `--runs` names models of `plain_text`,
too, and `--unread` domains that are left out, the control of what reading them gives. `text` is
the loss of unseen books that are written while they are read. `neighbours` are exact stores in the
table's place. Steps of half and a quarter of the size are the control: a memory that writes less
keeps more. Each result is a line of JSON; those in the file are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.data import TextData, load_tokenizer, make_dataset
from fwpkm_jax.evaluation.readers.whole_pass import write_rows
from fwpkm_jax.evaluation.reconfigure import with_rule
from fwpkm_jax.evaluation.record import first_group
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.paper.evaluation.domains import read_domains
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.run import Run, load_run
from lab.comparison.small_decoders import Lines
from lab.study.lookup.evaluation import with_open_gates
from lab.study.lookup.neighbours import with_neighbours
from lab.study.retention_domains import domains_kept, orders, without
from lab.study.retention_facts import FactsPlan, facts_kept, facts_texts, read_facts
from lab.study.retention_tables import (
    cost_table,
    domains_table,
    draw,
    each_domain_table,
    facts_table,
    forgetting_table,
    text_table,
    unread_table,
    without_plain,
)
from lab.study.retention_text import text_losses
from lab.study.study import DATA, DOMAINS, EXCERPTS, HAYSTACKS, write_excerpts

Line = dict[str, Any]
Measure = Literal["facts", "domains", "text", "cost"]


@dataclass(frozen=True)
class Method:
    """A way to write."""

    step: float = 1.0
    """Multiple of the plain step of the values."""
    keys: float = 1.0
    """Multiple of the keys' step; 0: they stand still."""
    retention: Retention | None = None
    inner_steps: int | None = None
    """Value steps per chunk; None: as the run was trained."""
    neighbours: int | None = None
    """Tokens of an exact store that is read in the table's place, empty at first; no table is
    written. None: the table."""
    keep: Literal["last", "strongest"] = "last"
    """Which of more tokens such a store keeps: the last ones, or those that replay keeps."""
    open_gates: bool = False
    """Whether all gates are 1 when such a store is read."""


def _still(**retention: Any) -> Method:
    return Method(keys=0.0, retention=Retention(**retention))


METHODS: dict[str, Method] = {
    "plain": Method(),
    "step 0.5": Method(step=0.5),
    "step 0.25": Method(step=0.25),
    "keys still": Method(keys=0.0),
    "keys still, relocation 1": _still(relocation=1.0),
    "keys still, relocation 4": _still(relocation=4.0),
    "keys still, replay 512": _still(replay=512),
    "keys still, relocation 1, replay 512": _still(relocation=1.0, replay=512),
    "keys still, relocation 1, replay 2048": _still(relocation=1.0, replay=2048),
    "keys still, hardening 1, 6 inner steps": replace(_still(hardening=1.0), inner_steps=6),
    "keys still, 4 inner steps": Method(keys=0.0, inner_steps=4),
    "keys still, relocation 1, replay 512, 4 inner steps": replace(
        _still(relocation=1.0, replay=512), inner_steps=4
    ),
    "keys still, relocation 1, replay 2048, 4 inner steps": replace(
        _still(relocation=1.0, replay=2048), inner_steps=4
    ),
    "neighbours, last 512": Method(neighbours=512),
    "neighbours, last 2048": Method(neighbours=2048),
    "neighbours, all": Method(neighbours=32768),
    "neighbours, strongest 512": Method(neighbours=512, keep="strongest"),
    "neighbours, strongest 2048": Method(neighbours=2048, keep="strongest"),
    "neighbours, all, gates open": Method(neighbours=32768, open_gates=True),
}
"""Ways to write that lower what is forgotten, their controls, and exact stores; lines have more."""
CONTROL = ("plain", "step 0.5", "step 0.25")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures ways to write by what they keep."""

    runs: tuple[Path, ...] = tuple(Path(f"runs/study/gdn_swa__fwpkm_seed{n}") for n in range(3))
    """Run directories of trained models; lines have the folder's name."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Ways to write."""
    measures: tuple[Measure, ...] = ("facts", "domains", "text", "cost")
    """What to measure."""
    orders: tuple[str, ...] = tuple(orders(DOMAINS))
    """Orders of the domains."""
    unread: tuple[str, ...] = ()
    """Domains that are left out of the orders, one at a time, and measured all the same: the
    control. None: every domain is read."""
    data: Path = DATA / "domains"
    """Folder that holds one folder per domain."""
    text: Path = EXCERPTS
    """Documents whose loss is measured, JSON Lines; if absent, the study's of unseen books."""
    batches: int = 48
    """Rows of each domain that each of a run's memories reads at most."""
    eval_batches: int = 8
    """Rows of each domain that each of these is evaluated on at most."""
    people: int = 20
    """Memories side by side that are told five facts each."""
    words: int = HAYSTACKS["needle_1x"]
    """Words of a haystack."""
    readings: int = 4
    """How often facts are told."""
    pieces: tuple[int, ...] = (10, 30)
    """Numbers of pieces of other text after which facts are asked for, increasing."""
    other_facts: int = 10
    """Haystacks with other facts after which facts are asked for."""
    length: int = 500
    """Tokens of a piece of other text."""
    seed: int = 0
    """Seed of the facts."""
    turns: int = 10
    """Timed turns of a way to write, after one that compiles; the fastest is reported."""
    out: Path = Path("lab/results/retention_gated_cpu.jsonl")
    """File of the results, which are added to."""
    tables: bool = False
    """Only prints the tables of the lines in `out`, and draws the picture."""
    image: Path = Path("runs/study/retention.png")
    """File of the picture: forgetting against what is learned."""


def written_so(run: Run, method: Method) -> tuple[LanguageModel, Memory]:
    """A run's model with another way to write, and its memory with the history that this needs.

    With neighbours, empty stores take the place of the memory that training left.
    """
    if method.neighbours is not None:
        model, memory = with_neighbours(
            run.model, run.memory, capacity=method.neighbours, keep=method.keep
        )
        return (with_open_gates(model) if method.open_gates else model), memory
    rule = run.model.config.fast_weight.rule
    if not isinstance(rule, FwPKM):
        if method != METHODS["plain"]:
            raise ValueError(f"{method} is a write of FwPKM; ask {type(rule).__name__} for plain.")
        return run.model, run.memory
    assert rule.value_step is None
    rule = replace(
        rule,
        value_step=method.step * rule.num_heads * rule.top_k,
        addressing_weight=method.keys * rule.addressing_weight,
        retention=method.retention,
        inner_steps=rule.inner_steps if method.inner_steps is None else method.inner_steps,
    )
    return with_rule(run.model, run.memory, rule)


def reader_of(run: Run, method: Method) -> LanguageModel:
    """What reads a memory that is written that way: all tables are read by the same program."""
    return written_so(run, METHODS["plain"] if method.neighbours is None else method)[0]


class Facts:
    """The facts measure of one run: its texts are read once, for all ways to write."""

    def __init__(self, run: Run, options: Options):
        text = run.experiment.data
        assert isinstance(text, TextData)
        self._run, self._tokenizer = run, load_tokenizer(text.tokenizer)
        self._plan = FactsPlan(
            people=options.people,
            words=options.words,
            readings=options.readings,
            pieces=options.pieces,
            other_facts=options.other_facts,
            length=options.length,
            seed=options.seed,
        )
        self._texts = facts_texts(text, self._tokenizer, self._plan)
        self._reader, memory = written_so(run, METHODS["plain"])
        self._read = read_facts(self._reader, memory, self._texts, self._tokenizer)

    def line(self, method: Method) -> Line:
        """What the run keeps of facts with that write."""
        model, memory = written_so(self._run, method)
        texts = (self._texts, self._read, self._tokenizer, self._plan)
        reader = self._reader if method.neighbours is None else model
        found = facts_kept(reader, model, memory, *texts)
        return {"facts": found, "settings": asdict(self._plan)}


def domains_line(run: Run, method: Method, order: Sequence[str], options: Options) -> Line:
    """What a run with that write gains from domains in an order, and loses again.

    Domains that are not in the order are measured unread.
    """
    text = run.experiment.data
    assert isinstance(text, TextData)
    model, memory = written_so(run, method)
    unread = [name for name in DOMAINS if name not in order]
    domains = read_domains([f"{name}={options.data / name}" for name in (*order, *unread)], text)
    read, never = domains[: len(order)], domains[len(order) :]
    sizes = {"batches": options.batches, "eval_batches": options.eval_batches}
    found = domains_kept(reader_of(run, method), model, memory, read, never, **sizes)
    return {"change": found, "settings": sizes}


def text_line(run: Run, method: Method, options: Options) -> Line:
    """Loss of each document of `text`, written with that way while it is read."""
    data = run.experiment.data
    assert isinstance(data, TextData)
    if not options.text.exists():
        write_excerpts()
    found = text_losses(*written_so(run, method), data, options.text)
    return {"text": found, "settings": {"text": options.text.name}}


def cost_line(run: Run, method: Method, options: Options) -> Line:
    """CPU time to read and write eight rows into one memory, and its history's or store's bytes."""
    text = run.experiment.data
    assert isinstance(text, TextData)
    model, memory = written_so(run, method)
    graphdef, params = nnx.split(model)
    rows = make_dataset(replace(text, needles=None), split="train", batch_size=8, seed=0)
    tokens = next(iter(rows))["tokens"]
    memory = jax.tree.map(jnp.copy, first_group(memory))
    seconds = []
    for _ in range(options.turns + 1):
        began = time.process_time()  # Of all threads; other programs on the core do not count.
        memory, _ = write_rows(graphdef, params, memory, tokens, fast_weight_dtype="float32")
        jax.block_until_ready(memory)
        seconds.append(time.process_time() - began)
    # A store is all history.
    history = jax.tree.leaves([getattr(one, "history", one) for one in memory.values()])
    return {
        "cpu_milliseconds": round(1e3 * min(seconds[1:]), 2),
        "history_bytes": sum(leaf.nbytes for leaf in history),
        "settings": {"turns": options.turns},
    }


LINES_OF = {"text": text_line, "cost": cost_line}
"""What makes the line of a measure that needs nothing else."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the file lacks, and prints the tables of all its lines."""
    options = parse(Options, argv, description=__doc__)
    lines = Lines(options.out)
    named = orders(DOMAINS)
    for option, known in (("methods", METHODS), ("orders", named), ("unread", DOMAINS)):
        if unknown := [name for name in getattr(options, option) if name not in known]:
            raise SystemExit(f"--{option}: {unknown} are none of {tuple(known)}.")
    named = {name: named[name] for name in options.orders}
    if options.unread:
        named = {k: v for unread in options.unread for k, v in without(named, unread).items()}
    for path in () if options.tables else options.runs:
        run, facts = load_run(path), None
        for name in options.methods:
            asked: list[tuple[str, str | None]] = []
            for measure in options.measures:
                orders_of = tuple(named) if measure == "domains" else (None,)
                asked += [(measure, order) for order in orders_of]
            for measure, order in asked:
                what = {"measure": measure, "run": path.name, "method": name, "order": order}
                what |= {} if order is None else {"batches": options.batches}
                if lines.find(**what):
                    continue
                began = time.monotonic()
                if measure in LINES_OF:
                    found = LINES_OF[measure](run, METHODS[name], options)
                elif order is None:
                    facts = facts or Facts(run, options)
                    found = facts.line(METHODS[name])
                else:
                    found = domains_line(run, METHODS[name], named[order], options)
                seconds = round(time.monotonic() - began, 1)
                lines.add({**what, **found, "seconds": seconds, "environment": environment_once()})
                print(f"{what}: {seconds} s", flush=True)
    if lacking := without_plain(lines.rows):
        raise SystemExit(
            f"{options.out}: {lacking} lack the plain write, with which the tables compare; "
            "measure them with --methods plain."
        )
    tables = (facts_table, forgetting_table, domains_table, each_domain_table, unread_table)
    for table in (*tables, text_table, cost_table):
        print(table(lines.rows), end="\n\n")
    draw(options.image, lines.rows, control=CONTROL)


if __name__ == "__main__":
    main()
