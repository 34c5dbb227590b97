"""Tells facts to the weights of the MLPs by gradient steps, and asks for them.

    python -m benchmarks.study.study --runs gdn_swa__fwpkm:0   # and :1, :2
    python -m benchmarks.study.facts_by_gradient

The facts, the texts and the questions are those of `benchmarks.study.retention`, which tells them
to FwPKM. Here FwPKM stays as training left it, and every reading of the haystacks is one or more
steps of gradient descent on the loss of their text: all people's haystacks are one batch, and all
facts go into the same weights. Each result is a line of JSON; those in the file are skipped.
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
from benchmarks.study.consolidation import DENSE, cross_entropy
from benchmarks.study.lasting_text import ask
from benchmarks.study.retention import Line, Lines
from benchmarks.study.retention_facts import FactsPlan, facts_texts, opened
from fwpkm_jax.data import TextData, Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.needle.samples import NeedleSample
from fwpkm_jax.models.language_model import Memory
from fwpkm_jax.run import Run, load_run
from fwpkm_jax.training.state import trained_part, with_trained

MOMENTS = ("told_1", "told", "other")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measures facts that gradient steps have told the weights of the MLPs."""

    runs: tuple[Path, ...] = tuple(Path(f"runs/study/gdn_swa__fwpkm_seed{n}") for n in range(3))
    """Run directories of models that were trained on needles."""
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
    out: Path = Path("benchmarks/results/facts_by_gradient_cpu.jsonl")
    """File of the results, which are added to."""


@partial(jax.jit, static_argnames="graphdef")
def learn(
    graphdef: Any,
    params: Any,
    slow: dict[str, jax.Array],
    memory: Memory,
    tokens: jax.Array,
    mask: jax.Array,
    rate: float,
) -> dict[str, jax.Array]:
    """The weights that learn after one step of gradient descent.

    Args:
      graphdef: the model's structure.
      params: its slow weights.
      slow: those that learn, by name, in place of their own.
      memory: fast weights, which are not written.
      tokens: int `[people, length + 1]`.
      mask: of that shape, 1 for real tokens; labels that are not real do not count.
      rate: of the step.
    """

    def loss(slow: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(mask[:, 1:]) * text_loss(graphdef, params, slow, memory, tokens, mask)

    gradients = jax.grad(loss)(slow)
    return {name: x - rate * gradients[name] for name, x in slow.items()}


@partial(jax.jit, static_argnames="graphdef")
def text_loss(
    graphdef: Any,
    params: Any,
    slow: dict[str, jax.Array],
    memory: Memory,
    tokens: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Mean loss of the real labels, in nats; the arguments are those of `learn`."""
    model = nnx.merge(graphdef, with_trained(params, slow, (DENSE,)))
    logits = model(tokens[:, :-1], memory, mask=mask[:, :-1], write=False).logits
    labels = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1])
    return cross_entropy(logits, labels * mask[:, 1:, None]) / jnp.sum(mask[:, 1:])


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


def facts_line(run: Run, rate: float, steps: int, plan: FactsPlan) -> Line:
    """Shares of right answers after one reading and all, and after other facts.

    Returns:
      `facts`, by moment (`told_1`, `told`, `other`) the result of `lasting_text.ask`; `loss`, of
      the haystacks with these facts, in nats, likewise and `before`; and the plan's `settings`.
    """
    data = run.experiment.data
    assert isinstance(data, TextData)
    tokenizer = load_tokenizer(data.tokenizer)
    texts = facts_texts(data, tokenizer, plan)
    graphdef, params = nnx.split(run.model)
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], plan.people, axis=0), run.memory)
    haystacks = (texts.told, *texts.other)
    longest = max(len(tokenizer.encode(one.haystack)) for each in haystacks for one in each)
    slow = trained_part(params, (DENSE,))
    found: dict[str, Any] = {}
    loss: dict[str, float] = {}
    told = padded(texts.told, tokenizer, longest)

    def read(samples: Sequence[NeedleSample], slow: dict[str, jax.Array]) -> dict[str, jax.Array]:
        tokens, mask = padded(samples, tokenizer, longest)
        for _ in range(steps):
            slow = learn(graphdef, params, slow, memory, tokens, mask, rate)
        return slow

    def asked(moment: str) -> None:
        model = nnx.merge(graphdef, with_trained(params, slow, (DENSE,)))
        state = opened(model, memory, plan.length)
        found[moment] = ask(model, state, texts.told, tokenizer)
        loss[moment] = measured()

    def measured() -> float:
        return round(float(text_loss(graphdef, params, slow, memory, *told)), 5)

    loss["before"] = measured()
    for reading in range(plan.readings):
        slow = read(texts.told, slow)
        if reading == 0:
            asked("told_1")
    asked("told")
    for samples in texts.other:
        slow = read(samples, slow)
    asked("other")
    return {"facts": found, "loss": loss, "settings": asdict(plan)}


def table(lines: Sequence[Line]) -> str:
    """Shares of right answers by moment, of each run, rate and number of steps."""
    if not lines:
        return ""
    settings = lines[0]["settings"]
    heads = ["run", "rate", "steps per reading", "told once", f"told {settings['readings']} times"]
    heads.append(f"after {settings['other_facts']} haystacks with other facts")
    heads += ["loss of the haystacks before", "and after all readings"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [line["run"], f"{line['rate']:g}", str(line["steps"])]
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
    for path in options.runs:
        run = load_run(path)
        for rate, steps in itertools.product(options.rates, options.steps):
            what = {"run": path.name, "rate": rate, "steps": steps, "settings": asdict(plan)}
            what["settings"]["pieces"] = list(plan.pieces)
            if lines.has(**what):
                continue
            began = time.monotonic()
            found = facts_line(run, rate, steps, plan)
            seconds = round(time.monotonic() - began, 1)
            lines.add({**found, **what, "seconds": seconds, "environment": environment_once()})
            print(f"{path.name} {rate:g} {steps}: {seconds} s", flush=True)
    print(table(lines.all))


if __name__ == "__main__":
    main()
