"""The reader of evaluations that read token after token: documents, haystacks, questions.

A model's structure is a static argument of the compiled calls, so all readers of one model in a
process share them. Texts are read in pieces of a few sizes, because each size is compiled.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.streams.pending import ChunkSize
from fwpkm_jax.evaluation.readers.devices import (
    check_one_stream,
    memory_on_devices,
    model_on_devices,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.finite import NONE, likeliest, not_finite
from fwpkm_jax.evaluation.readers.segments import cut_into_pieces, pad_into_pieces, piece_sizes
from fwpkm_jax.layers.partition import HEADS, SEQUENCE, Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream


class PieceReading(NamedTuple):
    """What one call gave, still on the device; trailing padding included.

    Attributes:
      losses: `[size]`, nats; None if no labels were given.
      next_token: the most likely token after the last one read; `finite.NONE` if there is none.
      gates: by memory layer `[size]`, the share of the memory's read in the layer's output.
      access: by memory layer the rule's report of its reads, leaves `[size, ...]`; a memory with
        slots reports `slot_ids` and `slot_weights`, `[size, places]`.
    """

    losses: jax.Array | None
    next_token: jax.Array
    gates: dict[str, jax.Array]
    access: dict[str, Any]


class Reading(NamedTuple):
    """What reading a text gave."""

    pieces: list[PieceReading]
    length: int
    """Tokens without padding."""
    last: int
    """Place of the last token in the last piece."""

    def losses(self) -> np.ndarray:
        """Each label's loss in nats, `[length]`."""
        return self._whole([piece.losses for piece in self.pieces])

    def fetch(self) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Losses `[length]`; gates `[length]` and slots read `[length, places]` by memory layer.

        Layers whose memory has no slots have no entry among the slots.
        """
        slots = [
            {layer: x.slot_ids for layer, x in piece.access.items() if hasattr(x, "slot_ids")}
            for piece in self.pieces
        ]
        rows = zip(self.pieces, slots, strict=True)
        return self._whole([(piece.losses, piece.gates, ids) for piece, ids in rows])

    def _whole(self, pieces: list[Any]) -> Any:
        """Arrays of the pieces, joined and without padding, as NumPy arrays."""
        return jax.tree.map(
            lambda *arrays: np.concatenate(arrays)[: self.length], *jax.device_get(pieces)
        )


class StreamReader:
    """A stream of batch 1 that is read text by text.

    The memory is written as chunks fill. With `chunk_size="flush"` all pairs wait until `write`
    writes them as one chunk: a whole text is then one chunk, and texts of different lengths share
    compilations.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        *,
        write: bool,
        piece_length: int,
        max_length: int | None = None,
        chunk_size: ChunkSize | None = None,
        capacity: int | None = None,
        vocab_size: int | None = None,
        fast_weight_dtype: FastWeightDtype = "float32",
        partition: Partition | None = None,
    ):
        """Prepares a stream.

        Args:
          model: the language model.
          memory: fast weights, leaves `[1, ...]`.
          write: False disables writing.
          piece_length: tokens read per call at most.
          max_length: tokens that full attention must keep; None: `piece_length`.
          chunk_size: tokens per write; None: the model's. "flush": only `write` writes.
          capacity: tokens that may wait for one write with "flush"; otherwise ignored.
          vocab_size: ids below this number may be answered; None: the model's.
          fast_weight_dtype: precision that fast weights are rounded to between calls.
          partition: devices that share the reading, see `LanguageModel.stream`; None: one.
        """
        check_one_stream(partition, "A reader")
        model, memory = model_on_devices(partition, model), memory_on_devices(partition, memory)
        fast_weight = model.config.fast_weight
        self.chunk_size = fast_weight.chunk_size if chunk_size is None else chunk_size
        self.lookahead = fast_weight.rule.lookahead
        self._writes, self._partition = write, partition
        self._holds = write and chunk_size == "flush"
        if not write:
            capacity = 1  # No pair waits.
        elif self.chunk_size != "flush":
            capacity = self.chunk_size
        self._capacity = capacity
        # Devices that share the tokens of a piece divide its length.
        devices = 1 if partition is None else partition.size(SEQUENCE, HEADS)
        self._sizes = piece_sizes(piece_length, devices=devices)
        # A frozen memory is not written with padding, so that the rest of a text may be one piece.
        self._cut = cut_into_pieces if write else pad_into_pieces
        self._graphdef, self._params = nnx.split(model)
        self._options = {
            "chunk_size": self.chunk_size,
            "write": write,
            "vocab_size": vocab_size,
            "partition": partition,
        }
        self._start = partial(
            model.init_stream,
            batch=1,
            max_length=piece_length if max_length is None else max_length,
            max_chunk_size=capacity,
        )
        self._dtype: FastWeightDtype = fast_weight_dtype
        self._initial_memory = as_stored(memory, fast_weight_dtype)
        self.reset_memory()

    @property
    def stream(self) -> Stream:
        """The current stream; the next call reuses its buffers."""
        return self._stream

    def reset_memory(self) -> None:
        """Resets the stream: the initial memory, empty caches and an empty queue."""
        # Copied: the stream's buffers are donated, and the initial memory is needed again.
        self._stream = self._start(jax.tree.map(jnp.copy, self._initial_memory))
        self._waiting = 0

    def restart(self, *, drop_queue: bool = False) -> None:
        """Empties attention and GDN caches; memory and, unless dropped, waiting tokens stay."""
        self._stream = reset_caches(self._graphdef, self._params, self._stream, pending=drop_queue)
        if drop_queue:
            self._waiting = 0

    def read(
        self, tokens: np.ndarray, labels: np.ndarray | None = None, *, round_memory: bool = True
    ) -> Reading:
        """Reads `[length]` token ids after those read since `restart`.

        Args:
          tokens: the ids.
          labels: `[length]`, the tokens to predict, if losses are asked for.
          round_memory: rounds what full chunks have written; False: the next call does.

        Raises:
          ValueError: more tokens would wait for a write than there is room for.
        """
        if not len(tokens):
            return Reading([], 0, last=-1)
        self._queue(len(tokens))
        sizes = self._cut(len(tokens), self._sizes)
        pieces, at = [], 0
        for size in sizes:
            part = slice(at, at + size)
            inputs, answers = _padded(tokens[part], size), None
            if labels is not None:
                answers = _padded(labels[part], size)
            real, mask = len(tokens) - at, None
            if real < size:
                mask = (np.arange(size)[None] < real).astype(np.float32)
            at += size
            reading, self._stream = _read_piece(
                *(self._graphdef, self._params, self._stream),
                *(inputs, answers, mask),
                **self._options,
            )
            pieces.append(reading)
        self._last = Reading(pieces, len(tokens), last=len(tokens) - (at - sizes[-1]) - 1)
        if round_memory:
            self.round_memory()
        return self._last

    def write(self) -> None:
        """Writes all waiting pairs as one chunk."""
        if self._writes:
            self._stream = flush(
                self._graphdef, self._params, self._stream, partition=self._partition
            )
            self._waiting = min(self._waiting, self.lookahead)
            self.round_memory()

    def round_memory(self) -> None:
        """Rounds the memory to its precision between calls."""
        if self._writes and self._dtype != "float32":
            self._stream = _rounded(self._stream, dtype=self._dtype)

    def next_token(self) -> int:
        """The most likely next token.

        Raises:
          ValueError: a log probability is not finite.
        """
        token = int(self._last.pieces[-1].next_token)
        if token == NONE:
            raise not_finite("The next token")
        return token

    def last_read(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Gates and access, by memory layer, of the last token read."""
        piece, place = self._last.pieces[-1], self._last.last
        return jax.device_get(jax.tree.map(lambda x: x[place], (piece.gates, piece.access)))

    def _queue(self, length: int) -> None:
        """Counts the tokens that wait for `write`."""
        if not self._holds:
            return
        assert self._capacity is not None, 'chunk_size="flush" needs a capacity'
        self._waiting += length
        room = self._capacity + self.lookahead
        if self._waiting > room:
            raise ValueError(
                f"{self._waiting} tokens wait for a write and there is room for {room}; raise "
                f"capacity={self._capacity} or write earlier."
            )


def _padded(tokens: np.ndarray, size: int) -> np.ndarray:
    """Token ids as int32 `[1, size]`, with zeros behind."""
    return np.pad(np.asarray(tokens, np.int32), (0, size - len(tokens)))[None]


def decode(reader: Any, first: int, *, length: int) -> list[int]:
    """Greedily decoded token ids, `length` of them: `first`, then each most likely next token."""
    tokens = [first]
    while len(tokens) < length:
        reader.read(np.asarray(tokens[-1:]))
        tokens.append(reader.next_token())
    return tokens


def label_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Loss of each label `[batch, length]` in nats, from logits `[batch, length, vocab]`."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@partial(jax.jit, static_argnames=("graphdef", "pending"), donate_argnames="stream")
def reset_caches(graphdef: Any, params: Any, stream: Stream, *, pending: bool) -> Stream:
    """The stream at position 0 with empty caches and unchanged memories; reuses the old buffers.

    See `LanguageModel.reset_caches`; `pending` says whether the queues are emptied too.
    """
    return nnx.merge(graphdef, params).reset_caches(stream, pending=pending)


@partial(jax.jit, static_argnames=("graphdef", "partition"), donate_argnames="stream")
def flush(
    graphdef: Any, params: Any, stream: Stream, *, partition: Partition | None = None
) -> Stream:
    """The stream with all waiting pairs written; reuses the old buffers. See LanguageModel."""
    return nnx.merge(graphdef, params).flush(stream, partition=partition)


@partial(jax.jit, static_argnames="dtype", donate_argnames="stream")
def _rounded(stream: Stream, *, dtype: FastWeightDtype) -> Stream:
    return stream._replace(memory=as_stored(stream.memory, dtype))


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
    labels: jax.Array | None,
    mask: jax.Array | None,
    *,
    vocab_size: int | None,
    **options: Any,
) -> tuple[PieceReading, Stream]:
    """The reading of `tokens` `[1, size]` and the stream after them; padding stands behind."""
    out = nnx.merge(graphdef, params).stream(tokens, stream, mask=mask, **options)
    last = -1 if mask is None else jnp.sum(mask != 0, dtype=jnp.int32) - 1
    return PieceReading(
        losses=None if labels is None else label_losses(out.logits, labels)[0],
        next_token=likeliest(out.logits[0, last, :vocab_size]),
        gates={layer: facts.gate[0] for layer, facts in out.info.items()},
        access={
            layer: jax.tree.map(lambda x: x[0], facts.access) for layer, facts in out.info.items()
        },
    ), out.stream
