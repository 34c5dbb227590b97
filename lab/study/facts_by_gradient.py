"""Tells facts to slow weights by gradient steps, and asks for them.

    python -m lab.study.study --runs gdn_swa__fwpkm:0   # and :1, :2
    python -m lab.study.facts_by_gradient

The facts, the texts and the questions are those of `lab.study.retention`, which tells them
to FwPKM. Every reading of the haystacks is one or more steps of gradient descent: all people's
haystacks are one batch, and all facts go into the same weights. What learns is a way of
`lab.study.consolidation`. With the text as the teacher FwPKM stays as training left it. With
the memory as the teacher each person's FwPKM is written first, as in `retention`; then the slow
weights learn to predict the haystack without FwPKM's writes as the trained model does with them.
Each result is a line of JSON; those in the file are skipped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.data import TextData, Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.needle.samples import NeedleSample
from fwpkm_jax.models.language_model import Memory
from fwpkm_jax.run import Run, load_run
from fwpkm_jax.training.state import trained_part, with_trained
from lab.study.consolidation import WAYS as ALL_WAYS
from lab.study.consolidation import Way, cross_entropy
from lab.study.lasting_text import ask
from lab.study.retention import METHODS, Line, Lines, Method, written_so
from lab.study.retention_facts import (
    FactsPlan,
    facts_texts,
    opened,
    read_facts,
    without_history,
    write_facts,
)

MOMENTS = ("told_1", "told", "other")
WAYS = {name: way for name, way in ALL_WAYS.items() if way.teacher != "text" or not way.carried}
"""The ways whose FwPKM, if it is written, is written by the model that was trained."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures facts that gradient steps have told slow weights."""

    runs: tuple[Path, ...] = tuple(Path(f"runs/study/gdn_swa__fwpkm_seed{n}") for n in range(3))
    """Run directories of models that were trained on needles."""
    ways: tuple[str, ...] = ("text, dense",)
    """What learns; see `WAYS`."""
    rates: tuple[float, ...] = (1e-5,)
    """Of the steps, of a loss summed over the batch's tokens."""
    steps: tuple[int, ...] = (1, 16)
    """Steps per reading."""
    people: int = 20
    """Haystacks of five facts, read side by side."""
    words: int = 56
    """Words of a haystack."""
    readings: int = 4
    """How often facts are told."""
    other_facts: int = 10
    """Haystacks of each person with other facts, told once, after which the facts are asked for."""
    seed: int = 0
    """Seed of the facts."""
    out: Path = Path("lab/results/facts_by_gradient_cpu.jsonl")
    """File of the results, which are added to."""


@partial(jax.jit, static_argnames=("graphdef", "trained"))
def learn(
    graphdef: Any,
    params: Any,
    slow: dict[str, jax.Array],
    memory: Memory,
    tokens: jax.Array,
    mask: jax.Array,
    target: jax.Array,
    rate: float,
    *,
    trained: str,
) -> dict[str, jax.Array]:
    """The weights that learn after one step of gradient descent.

    Args:
      graphdef: the model's structure.
      params: its slow weights.
      slow: those that learn, by name, in place of their own.
      memory: fast weights, which are not written.
      tokens: int `[people, length + 1]`.
      mask: of that shape, 1 for real tokens; labels that are not real do not count.
      target: probabilities of the labels to learn, `[people, length, vocab]`.
      rate: of the step.
      trained: pattern of the weights that learn.
    """

    def loss(slow: dict[str, jax.Array]) -> jax.Array:
        own = with_trained(params, slow, (trained,))
        logits = logits_of(graphdef, own, memory, tokens, mask)
        return cross_entropy(logits, target * mask[:, 1:, None])

    gradients = jax.grad(loss)(slow)
    return {name: x - rate * gradients[name] for name, x in slow.items()}


@partial(jax.jit, static_argnames="graphdef")
def logits_of(
    graphdef: Any, params: Any, memory: Memory, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    """Logits of each label of haystacks that are not written, `[people, length, vocab]`."""
    model = nnx.merge(graphdef, params)
    return model(tokens[:, :-1], memory, mask=mask[:, :-1], write=False).logits


def text_loss(
    graphdef: Any, params: Any, memory: Memory, tokens: jax.Array, mask: jax.Array
) -> float:
    """Mean loss of the real labels, in nats; the arguments are those of `learn`."""
    logits = logits_of(graphdef, params, memory, tokens, mask)
    labels = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1]) * mask[:, 1:, None]
    return float(cross_entropy(logits, labels) / jnp.sum(mask[:, 1:]))


def padded(
    samples: Sequence[NeedleSample], tokenizer: Tokenizer, length: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens `[people, length]` of each haystack, zeros behind its end, and their mask."""
    texts = [tokenizer.encode(sample.haystack) for sample in samples]
    tokens = np.zeros((len(texts), length), np.int32)
    mask = np.zeros((len(texts), length), np.float32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        mask[row, : len(text)] = 1.0
    return jnp.asarray(tokens), jnp.asarray(mask)


def facts_line(run: Run, way: Way, rate: float, steps: int, plan: FactsPlan) -> Line:
    """Shares of right answers after one reading and all, and after other facts.

    Returns:
      `facts`, by moment (`told_1`, `told`, `other`) the result of `lasting_text.ask`; `loss`, of
      the haystacks with these facts, in nats, likewise and `before`; and the plan's `settings`.
    """
    data = run.experiment.data
    assert isinstance(data, TextData)
    tokenizer = load_tokenizer(data.tokenizer)
    texts = facts_texts(data, tokenizer, plan)
    (writer, fast), (reader, _) = (written_so(run, METHODS[way.write]), written_so(run, Method()))
    graphdef, params = nnx.split(reader)
    slow = trained_part(params, (way.trained,))
    if not slow and way.teacher is not None:
        raise SystemExit(f"{run.experiment.run_dir}: no {way.trained} that can learn.")
    fast = unread = jax.tree.map(lambda x: jnp.repeat(x[:1], plan.people, axis=0), fast)
    start = without_history(unread)
    waiting = read_facts(reader, start, texts, tokenizer)
    write = partial(write_facts, *nnx.split(writer))
    longest = max(
        len(tokenizer.encode(one.haystack)) for each in (texts.told, *texts.other) for one in each
    )
    told = padded(texts.told, tokenizer, longest)
    found: dict[str, Any] = {}
    loss = {"before": round(text_loss(graphdef, params, start, *told), 5)}

    def tell(tokens: jax.Array, mask: jax.Array, layers: Any) -> None:
        nonlocal slow, fast
        if way.teacher != "text":
            fast = write(fast, layers)
        if way.teacher is None:
            return
        if way.teacher == "memory":
            known = without_history(fast)
            target = jax.nn.softmax(logits_of(graphdef, params, known, tokens, mask))
        else:
            target = jax.nn.one_hot(tokens[:, 1:], tokenizer.vocab_size)
        for _ in range(steps):
            read = (start, tokens, mask, target)
            slow = learn(graphdef, params, slow, *read, rate, trained=way.trained)

    def asked(moment: str) -> None:
        own = with_trained(params, slow, (way.trained,))
        model, memory = nnx.merge(graphdef, own), without_history(fast) if way.carried else start
        found[moment] = ask(model, opened(model, memory, plan.length), texts.told, tokenizer)
        loss[moment] = round(text_loss(graphdef, own, memory, *told), 5)

    for reading in range(plan.readings):
        tell(*told, waiting.told)
        if reading == 0:
            asked("told_1")
    asked("told")
    for samples, layers in zip(texts.other, waiting.other, strict=True):
        if not way.carried:
            fast = unread
        tell(*padded(samples, tokenizer, longest), layers)
    asked("other")
    return {"facts": found, "loss": loss, "settings": asdict(plan)}


def table(lines: Sequence[Line]) -> str:
    """Shares of right answers by moment, of each run, way, rate and number of steps."""
    if not lines:
        return ""
    settings = lines[0]["settings"]
    heads = ["run", "what learns", "rate", "steps per reading"]
    heads += ["told once", f"told {settings['readings']} times"]
    heads.append(f"after {settings['other_facts']} haystacks with other facts")
    heads += ["loss of the haystacks before", "and after all readings"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [line["run"], line["way"], f"{line['rate']:g}", str(line["steps"])]
        cells += [f"{line['facts'][moment]['exact']:.2f}" for moment in MOMENTS]
        cells += [f"{line['loss'][moment]:.2f}" for moment in ("before", "told")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the file lacks, and prints the table of all its lines."""
    options = parse(Options, argv, description=__doc__)
    lines = Lines(options.out)
    plan = FactsPlan(
        people=options.people,
        words=options.words,
        readings=options.readings,
        pieces=(0,),
        other_facts=options.other_facts,
        length=500,
        seed=options.seed,
    )
    if unknown := set(options.ways) - set(WAYS):
        raise SystemExit(f"--ways: {sorted(unknown)} are none of {tuple(WAYS)}.")
    learned = tuple(itertools.product(options.rates, options.steps))
    asked = [
        (name, *one)
        for name in options.ways
        for one in (learned if WAYS[name].teacher else ((0.0, 0),))
    ]
    for path in options.runs:
        run = load_run(path)
        for name, rate, steps in asked:
            what = {"run": path.name, "way": name, "rate": rate, "steps": steps}
            what["settings"] = {**asdict(plan), "pieces": list(plan.pieces)}
            if lines.has(**what):
                continue
            began = time.monotonic()
            found = facts_line(run, WAYS[name], rate, steps, plan)
            seconds = round(time.monotonic() - began, 1)
            lines.add({**found, **what, "seconds": seconds, "environment": environment_once()})
            print(f"{path.name} {name} {rate:g} {steps}: {seconds} s", flush=True)
    print(table(lines.all))


if __name__ == "__main__":
    main()
