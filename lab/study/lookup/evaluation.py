"""Asks a trained model in sentences: written, frozen, and with every token kept exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.evaluation import Subject
from fwpkm_jax.models.language_model import LanguageModel
from lab.study.lookup.neighbours import with_neighbours
from lab.study.lookup.texts import DIGITS, Questions, questions

_OPEN = 30.0
"""Added to a gate's argument, so that its sigmoid is 1 in single precision."""


class Score(NamedTuple):
    """Answers of one row, means over its questions."""

    first: float
    """Share whose first digit is the likeliest of the ten."""
    later: float
    """The same of the further digits, the ones before them given."""
    exact: float
    """Share whose six digits are all the likeliest bytes, which greedy generation would write."""
    nats: float
    """Loss of the six digits together."""


class Way(NamedTuple):
    """How a model reads a row."""

    model: LanguageModel
    memory: Any
    """At the start of each row, leaves `[books, ...]`."""
    write: bool


def ways_of(subject: Subject, *, books: int, neighbours: bool) -> dict[str, Way]:
    """The ways to read, by name: `read` alone for a model without memory layers.

    With memory layers: written, frozen, written with all gates open, and neighbours both ways;
    without gates there is nothing to open.

    Args:
      subject: a trained model; with a memory each row starts from the one that training left.
      books: rows that are read side by side.
      neighbours: whether to read once more with `NearestNeighbours` in the place of the memory,
        empty at the start of each row, every other weight as it was trained.
    """
    model = subject.model
    if not subject.memory:
        return {"read": Way(model, {}, True)}
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], books, axis=0), subject.memory)
    found = {"written": Way(model, memory, True), "frozen": Way(model, memory, False)}
    gated = model.config.fast_weight.has_gate
    if gated:
        found["gates open"] = Way(with_open_gates(model), memory, True)
    if neighbours:
        exact, empty = with_neighbours(model, memory)
        found["neighbours"] = Way(exact, empty, True)
        if gated:
            found["neighbours, gates open"] = Way(with_open_gates(exact), empty, True)
    return found


def with_open_gates(model: LanguageModel) -> LanguageModel:
    """The model with all gates of its memories at 1, for reads and writes."""
    model = nnx.clone(model)
    for number in model.config.memory_layers:
        bias = model.blocks[number].memory.gate_proj.bias
        bias[...] = bias[...] + _OPEN
    return model


class Answers(NamedTuple):
    """What a model answers in several sentences."""

    scores: list[list[Score]]
    """By sentence and book."""
    gates: list[float] | None
    """Mean gate where the next byte is the first digit of a statement, a later one, and at all
    other bytes; None without memory layers."""


def ask(way: Way, books: Sequence[bytes], sentences: Sequence[str], *, seed: int) -> Answers:
    """Asks in each sentence, in a row of each book."""
    scores, gates = [], []
    for number, sentence in enumerate(sentences):
        asked = questions(books, sentence, number=number, of=len(sentences), seed=seed)
        logits, gate = _read(way.model, jnp.asarray(asked.tokens[:, :-1]), way.memory, way.write)
        scores.append(list(scores_of(np.asarray(logits), asked)))
        if gate is not None:
            gates.append(_gates(np.asarray(gate), asked))
    return Answers(scores, np.mean(gates, axis=0).round(4).tolist() if gates else None)


@nnx.jit(static_argnums=3)
def _read(
    model: LanguageModel, tokens: jax.Array, memory: Any, write: bool
) -> tuple[jax.Array, jax.Array | None]:
    out = model(tokens, memory, write=write)
    gates = [info.gate for info in out.info.values()]
    return out.logits, jnp.stack(gates).mean(axis=0) if gates else None


def _gates(gate: np.ndarray, asked: Questions) -> list[float]:
    """Means where the next byte is the first digit of a statement, a later one, and elsewhere."""
    kind = np.full(gate.shape, 2)
    for row, places in zip(kind, asked.stated, strict=True):
        row[(places[:, None] + np.arange(1, DIGITS) - 1).ravel()] = 1
        row[places - 1] = 0
    return [float(gate[kind == one].mean()) for one in range(3)]


def scores_of(logits: np.ndarray, asked: Questions) -> Iterator[Score]:
    """The `Score` of each row.

    Args:
      logits: `[books, length, vocab]`, of the byte behind each position.
      asked: the rows.
    """
    digits = ord("0") + np.arange(10)
    for row, tokens, places in zip(logits, asked.tokens, asked.answers, strict=True):
        at = places[:, None] + np.arange(DIGITS)  # [needles, digits]
        right, found = tokens[at], row[at - 1].astype(np.float64)
        exact = (found.argmax(axis=-1) == right).all(axis=1)
        chosen = found[..., digits].argmax(axis=-1) == right - ord("0")
        top = found.max(axis=-1, keepdims=True)
        nats = top[..., 0] + np.log(np.exp(found - top).sum(axis=-1))
        nats -= np.take_along_axis(found, right[..., None], axis=-1)[..., 0]
        means = chosen[:, 0].mean(), chosen[:, 1:].mean(), exact.mean(), nats.sum(axis=1).mean()
        yield Score(*(round(float(x), 4) for x in means))
