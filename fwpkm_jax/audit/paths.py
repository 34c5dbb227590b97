"""The ways in which a `LanguageModel` turns tokens into logits, as functions for `causality`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.audit.causality import Logits, places
from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.evaluation.readers.devices import (
    memory_on_devices,
    model_on_devices,
    rows_on_devices,
)
from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import mixer_memory
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream

NEW = 4
"""Tokens that a user's answer has."""
_PAIR = 2
_MOST_BYTES = 2**30  # Of the memories of all rows together.


class Probe(NamedTuple):
    """Random texts that all checks of a model read, so that they share compilations.

    Attributes:
      tokens: `[rows, length]`, several chunks and a part of one.
      changed: positions of the tokens that are changed.
      apart: whether there is a row with a memory of its own for each of them; otherwise, where
        memories are large, there are two rows.
    """

    tokens: np.ndarray
    changed: list[int]
    apart: bool


def probe(model: LanguageModel, memory: Memory, *, seed: int) -> Probe:
    """The texts of a model; `memory` has leaves `[1, ...]`."""
    sizes = chunk_sizes(model)
    length = 5 * (sizes[-1] // 2 + 3)
    changed = places(length, sizes)
    changed += changed[-1:] * (len(changed) % 2)  # So that two devices can share the rows.
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    apart = one * len(changed) <= _MOST_BYTES
    rows = len(changed) if apart else _PAIR
    rng = np.random.default_rng(seed)
    tokens = rng.integers(model.config.vocab_size, size=(rows, length)).astype(np.int32)
    return Probe(tokens, changed, apart)


def chunk_sizes(model: LanguageModel) -> list[int]:
    """Tokens per write of the model's memories, those of mixers with a memory included."""
    own = mixer_memory(model.config)
    sizes = {own.chunk_size} if own is not None else set()
    if model.config.memory_layers:
        sizes.add(model.config.fast_weight.chunk_size)
    return sorted(sizes) or [16]  # Without a memory: any length.


def for_rows(memory: Memory, rows: int) -> Memory:
    """The first group's memory once for each of `rows` sequences."""
    return map_unshared(lambda x: jnp.broadcast_to(x[:1], (rows, *x.shape[1:])), memory)


def whole_pass(
    model: LanguageModel,
    memory: Memory,
    *,
    write: bool = True,
    documents: bool = False,
    partition: Partition | None = None,
) -> Logits:
    """Whole sequences from position 0, as in training.

    Args:
      model: the language model.
      memory: fast weights, leaves `[groups, ...]`; groups divides the rows.
      write: whether the memory is written.
      documents: a row holds two documents, of a third and two thirds of it.
      partition: devices that share the work; None: one.
    """
    graphdef, params = nnx.split(model_on_devices(partition, model))
    memory = memory_on_devices(partition, memory)

    def path(tokens: np.ndarray) -> np.ndarray:
        ids = None
        if documents:
            ids = np.broadcast_to(1 + (np.arange(tokens.shape[1]) >= split(tokens)), tokens.shape)
        options = {"segment_ids": ids, "write": write, "partition": partition}
        return np.asarray(_whole(graphdef, params, memory, tokens, **options))

    return path


def split(tokens: np.ndarray) -> int:
    """Where the second document of a row begins, see `whole_pass`."""
    return tokens.shape[1] // 3


@partial(jax.jit, static_argnames=("graphdef", "write", "partition"))
def _whole(
    graphdef: Any,
    params: Any,
    memory: Memory,
    tokens: jax.Array,
    *,
    segment_ids: jax.Array | None,
    write: bool,
    partition: Partition | None,
) -> jax.Array:
    model = nnx.merge(graphdef, params)
    rows = rows_on_devices(partition, model, tokens, memory)
    out = model(rows.tokens, memory, write=write, segment_ids=segment_ids, **rows.options)
    return out.logits[:, : tokens.shape[1]]


def stream_in_pieces(
    model: LanguageModel, memory: Memory, *, piece: int, write: bool = True
) -> Logits:
    """A stream in pieces of `piece` tokens, through caches and queues; the last may be shorter."""
    graphdef, params = nnx.split(model)

    def path(tokens: np.ndarray) -> np.ndarray:
        stream = start_stream(model, memory, tokens)
        found = []
        for start in range(0, tokens.shape[1], piece):
            part = tokens[:, start : start + piece]
            logits, stream = read_piece(graphdef, params, stream, part, write=write)
            found.append(np.asarray(logits))
        return np.concatenate(found, axis=1)

    return path


def start_stream(model: LanguageModel, memory: Memory, tokens: np.ndarray) -> Stream:
    """A stream with room for the tokens `[batch, length]`."""
    rows, length = tokens.shape
    return model.init_stream(jax.tree.map(jnp.copy, memory), batch=rows, max_length=length)


@partial(jax.jit, static_argnames=("graphdef", "write"), donate_argnames="stream")
def read_piece(
    graphdef: Any, params: Any, stream: Stream, tokens: jax.Array, *, write: bool = True
) -> tuple[jax.Array, Stream]:
    """Logits of a piece of a stream, and the stream behind it, whose buffers are reused."""
    out = nnx.merge(graphdef, params).stream(tokens, stream, write=write)
    return out.logits, out.stream


def generation(
    model: LanguageModel, memory: Memory, *, ends: list[int], write: bool = True
) -> Logits:
    """The logits behind prompts that `generate` reads, and zeros at all other positions.

    The whole text is a prompt that is read in parts, each call up to one of `ends`.
    """

    def path(tokens: np.ndarray) -> np.ndarray:
        rows, length = tokens.shape
        state = init_generation(model, memory, batch=rows, max_length=length + NEW)
        found = np.zeros((rows, length, model.config.vocab_size), np.float32)
        start = 0
        for end in [*ends, length]:
            state = generate(
                model, tokens[:, start:end], state, max_new_tokens=0, write=write
            ).state
            found[:, end - 1] = np.asarray(state.logits)
            start = end
        return found

    return path
