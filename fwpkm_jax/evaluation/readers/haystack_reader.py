"""Reads long texts into the memory with one write per reading, and decodes answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.streams.queue import ChunkSize
from fwpkm_jax.evaluation.readers.devices import (
    check_one_stream,
    memory_on_devices,
    model_on_devices,
    padding_mask,
    parts_of,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.finite import NONE, likeliest, not_finite, require_finite
from fwpkm_jax.evaluation.readers.segments import cut_into_pieces, piece_sizes
from fwpkm_jax.evaluation.readers.stream_calls import flush, label_losses, reset_caches
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream


class LastRead(NamedTuple):
    """What a memory layer did at the last token read.

    Attributes:
      gate: share of the memory's read in the layer's output, a scalar.
      access: the rule's report of the read; for a memory with slots it has `slot_ids` and
        `slot_weights`, `[places]`.
    """

    gate: jax.Array | np.ndarray
    access: Any


class Reader(Protocol):
    """The methods of a reader that the needle protocol calls; see `HaystackReader`."""

    def reset_memory(self) -> None: ...
    def restart(self) -> None: ...
    def read(self, tokens: np.ndarray) -> None: ...
    def write(self) -> None: ...
    def next_token(self) -> int: ...


def decode(reader: Reader, first: int, *, length: int) -> list[int]:
    """Greedily decoded token ids, `length` of them: `first`, then each most likely next token."""
    tokens = [first]
    while len(tokens) < length:
        reader.read(np.asarray(tokens[-1:]))
        tokens.append(reader.next_token())
    return tokens


class HaystackReader:
    """A stream of batch 1 whose memory is written when `write` is called.

    With `chunk_size="flush"`, pairs wait until `write` writes all of them as one chunk. A whole
    text is then one chunk, and texts of different lengths share compilations. With a number as
    `chunk_size`, full chunks are also written as they fill.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        *,
        capacity: int,
        max_length: int,
        piece_length: int,
        vocab_size: int,
        write: bool,
        chunk_size: ChunkSize = "flush",
        fast_weight_dtype: FastWeightDtype = "float32",
        partition: Partition | None = None,
    ):
        """Prepares a stream.

        Args:
          model: the language model.
          memory: fast weights, leaves `[1, ...]`.
          capacity: tokens that may wait for one write; ignored if `chunk_size` is a number.
          max_length: tokens that full attention must keep.
          piece_length: tokens read per call.
          vocab_size: ids below this number may be answered; the model's table may be larger.
          write: False disables writing.
          chunk_size: tokens per write; "flush": only `write` writes.
          fast_weight_dtype: precision that fast weights are rounded to after each call that may
            write.
          partition: devices that share the reading, see `LanguageModel.stream`; None: one.
        """
        check_one_stream(partition, "A reader")
        model, memory = model_on_devices(partition, model), memory_on_devices(partition, memory)
        self._writes, self._partition = write, partition
        self._sizes = piece_sizes(piece_length, parts=parts_of(partition))
        self._graphdef, self._params = nnx.split(model)
        self._options = {"chunk_size": chunk_size, "write": write, "partition": partition}
        self._vocab_size = vocab_size
        self._holds = write and chunk_size == "flush"
        self._lookahead = model.config.fast_weight.rule.lookahead
        if not write:
            capacity = 1  # No pairs are queued if writing is disabled.
        elif chunk_size != "flush":
            capacity = chunk_size
        self._capacity = capacity
        self._start = partial(
            model.init_stream, batch=1, max_length=max_length, max_chunk_size=capacity
        )
        self._dtype: FastWeightDtype = fast_weight_dtype
        self._initial_memory = as_stored(memory, fast_weight_dtype)
        self.reset_memory()

    def reset_memory(self) -> None:
        """Resets the stream: the initial memory, empty caches and an empty queue."""
        # Copied: the stream's buffers are donated, and the initial memory is needed again.
        self._stream = self._start(jax.tree.map(jnp.copy, self._initial_memory))
        self._waiting = 0

    def restart(self) -> None:
        """Empties attention and GDN caches; memory and waiting tokens stay."""
        self._stream = reset_caches(self._graphdef, self._params, self._stream, pending=False)

    def read(self, tokens: np.ndarray) -> None:
        """Reads `[length]` token ids after those read since `restart`.

        Raises:
          ValueError: more tokens would wait for a write than there is room for.
        """
        self._queue(len(tokens))
        for piece in self._pieces(tokens):
            self._next, self._last_read, self._stream = _read_piece(
                *(self._graphdef, self._params, self._stream, *piece),
                vocab_size=self._vocab_size,
                **self._options,
            )
        if not self._holds:
            self._store()

    def score(self, tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Reads `[length]` tokens like `read`; returns each label's loss in nats, `[length]`."""
        self._queue(len(tokens))
        losses = []
        for (piece, mask), (answers, _) in zip(
            self._pieces(tokens), self._pieces(labels), strict=True
        ):
            loss, self._stream = _score_piece(
                self._graphdef, self._params, self._stream, piece, answers, mask, **self._options
            )
            losses.append(loss)
        found = np.concatenate(jax.device_get(losses))[: len(tokens)]
        return require_finite(found, where="The answer")

    def write(self) -> None:
        """Writes all waiting pairs as one chunk."""
        if self._writes:
            self._stream = flush(
                self._graphdef, self._params, self._stream, partition=self._partition
            )
            self._waiting = min(self._waiting, self._lookahead)
            self._store()

    def next_token(self) -> int:
        """The most likely next token.

        Raises:
          ValueError: a log probability is not finite.
        """
        token = int(self._next)
        if token == NONE:
            raise not_finite("The next token")
        return token

    def last_read(self) -> dict[str, LastRead]:
        """What each memory layer did at the last token read, by layer name."""
        return jax.device_get(self._last_read)

    def _pieces(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The tokens as pieces `[1, size]`, the last one padded, each with its mask."""
        at = 0
        for size in cut_into_pieces(len(tokens), self._sizes):
            part = np.zeros((1, size), np.int32)
            real = tokens[at : at + size]
            part[0, : len(real)] = real
            yield part, padding_mask(size, real=len(real))
            at += size

    def _store(self) -> None:
        memory = as_stored(self._stream.memory, self._dtype)
        self._stream = self._stream._replace(memory=memory)

    def _queue(self, length: int) -> None:
        if not self._holds:
            return
        self._waiting += length
        room = self._capacity + self._lookahead
        if self._waiting > room:
            raise ValueError(
                f"{self._waiting} tokens wait for a write and there is room for {room}; raise "
                f"capacity={self._capacity} or write earlier."
            )

    @property
    def stream(self) -> Stream:
        """The current stream; the next call reuses its buffers."""
        return self._stream


@partial(
    jax.jit,
    static_argnames=("graphdef", "chunk_size", "write", "vocab_size", "partition"),
    donate_argnames="stream",
)
def _read_piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    mask: jax.Array | None,
    *,
    chunk_size: ChunkSize,
    write: bool,
    vocab_size: int,
    partition: Partition | None,
) -> tuple[jax.Array, dict[str, LastRead], Stream]:
    """The most likely token after `tokens` `[1, length]`, each memory's last read, the stream.

    Padding stands behind the last real token.
    """
    out = nnx.merge(graphdef, params).stream(
        tokens, stream, mask=mask, chunk_size=chunk_size, write=write, partition=partition
    )
    last = -1 if mask is None else jnp.sum(mask != 0, dtype=jnp.int32) - 1
    last_read = {
        layer: jax.tree.map(lambda x: x[0, last], LastRead(facts.gate, facts.access))
        for layer, facts in out.info.items()
    }
    return likeliest(out.logits[0, last, :vocab_size]), last_read, out.stream


@partial(
    jax.jit,
    static_argnames=("graphdef", "chunk_size", "write", "partition"),
    donate_argnames="stream",
)
def _score_piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None,
    *,
    chunk_size: ChunkSize,
    write: bool,
    partition: Partition | None,
) -> tuple[jax.Array, Stream]:
    """Losses `[length]` of the labels of `tokens` `[1, length]`, and the stream after them."""
    out = nnx.merge(graphdef, params).stream(
        tokens, stream, mask=mask, chunk_size=chunk_size, write=write, partition=partition
    )
    return label_losses(out.logits, labels)[0], out.stream
