"""Reads documents segment by segment: each token's loss, the memory's gates and slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.evaluation.readers.devices import (
    check_one_stream,
    memory_on_devices,
    model_on_devices,
    padding_mask,
    parts_of,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.segments import (
    Segment,
    Segmentation,
    cut_into_pieces,
    padded_length,
    pairs_left_by_the_reference,
    piece_sizes,
    split_into_segments,
)
from fwpkm_jax.evaluation.readers.stream_calls import (
    flush,
    label_losses,
    reset_caches,
    store_memory,
)
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream


class PieceReading(NamedTuple):
    """Losses, gates and slots of one call, still on the device; trailing padding included."""

    losses: jax.Array
    """`[length]`, nats."""
    gates: dict[str, jax.Array]
    """Gates `[length]`, by memory layer."""
    slot_ids: dict[str, jax.Array]
    """Slots read `[length, places]`, by memory layer; only layers whose memory has slots."""


class SegmentReading(NamedTuple):
    """Losses, gates and slots of one segment."""

    pieces: list[PieceReading]
    length: int
    """Tokens without padding."""

    def fetch(self) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Losses, gates and slot ids of the whole segment, as NumPy arrays."""
        pieces = jax.device_get(self.pieces)
        whole = jax.tree.map(lambda *parts: np.concatenate(parts)[: self.length], *pieces)
        return whole.losses, whole.gates, whole.slot_ids


class SegmentReader:
    """Reads documents as one stream of batch 1, with few compiled functions.

    With writing enabled, a short segment is read in pieces of a few sizes, because padding would
    enter the queue of tokens to be written. With writing disabled, it is padded instead: reads are
    causal, so the padding at the end changes no loss.

    Over several devices, each reads a part of every piece. The last piece of a segment takes
    padding up to a number that divides into the parts; `mask` keeps it out of the queue.
    """

    def __init__(
        self,
        model: LanguageModel,
        memory: Memory,
        *,
        write: bool,
        segment_length: int,
        segmentation: Segmentation = "overlap",
        chunk_size: int | None = None,
        queue: Literal["document", "segment"] = "document",
        memory_reset: Literal["never", "document"] = "never",
        fast_weight_dtype: FastWeightDtype = "float32",
        partition: Partition | None = None,
    ):
        """Creates a stream from `memory`, leaves `[1, ...]`; for options see PerplexityConfig.

        With a `partition`, its devices share the reading, see `LanguageModel.stream`.
        """
        check_one_stream(partition, "A reader")
        model, memory = model_on_devices(partition, model), memory_on_devices(partition, memory)
        self._partition = partition
        fast_weight = model.config.fast_weight
        self._chunk_size = fast_weight.chunk_size if chunk_size is None else chunk_size
        self._lookahead = fast_weight.rule.lookahead
        self._write, self._queue, self._memory_reset = write, queue, memory_reset
        self._segment_length = segment_length
        self._segmentation: Segmentation = segmentation
        self._fast_weight_dtype: FastWeightDtype = fast_weight_dtype
        self._sizes = piece_sizes(segment_length, parts=parts_of(partition))
        self._graphdef, self._params = nnx.split(model)
        self._start = partial(
            model.init_stream,
            batch=1,
            max_length=segment_length,
            max_chunk_size=self._chunk_size,
        )
        self._initial_memory = memory
        self._stream = self._new_stream()

    @property
    def memory(self) -> Memory:
        """A copy of the current fast weights; later calls reuse the stream's own buffers."""
        return jax.tree.map(jnp.copy, self._stream.memory)

    def read(self, tokens: np.ndarray) -> Iterator[SegmentReading]:
        """Reads one document and yields its segments' readings in order.

        Args:
          tokens: token ids `[length]` of the whole document.
        """
        if self._memory_reset == "document":
            self._stream = self._new_stream()
        for segment in split_into_segments(
            len(tokens), segment_length=self._segment_length, segmentation=self._segmentation
        ):
            self._stream = reset_caches(self._graphdef, self._params, self._stream, pending=False)
            yield self._read_segment(tokens, segment)
            if self._queue == "segment":
                # At the end of a segment the release writes the pairs that our queue would write
                # with the next token, and drops the rest.
                writes = pairs_left_by_the_reference(
                    segment.length, chunk_size=self._chunk_size, lookahead=self._lookahead
                )
                self._end_queue(written=writes)
            self._store()
        if self._queue == "document":
            self._end_queue(written=True)
            self._store()

    def _read_segment(self, tokens: np.ndarray, segment: Segment) -> SegmentReading:
        start, end = segment.start, segment.start + segment.length
        if self._write:
            sizes = cut_into_pieces(segment.length, self._sizes)
        else:
            sizes = [padded_length(segment.length, self._sizes)]
        inputs = np.zeros((1, sum(sizes)), np.int32)
        labels = np.zeros((1, sum(sizes)), np.int32)
        inputs[0, : segment.length] = tokens[start:end]
        labels[0, : segment.length] = tokens[start + 1 : end + 1]
        pieces, at = [], 0
        for size in sizes:
            part = slice(at, at + size)
            self._stream, reading = _read_piece(
                self._graphdef,
                self._params,
                self._stream,
                inputs[:, part],
                labels[:, part],
                padding_mask(size, real=segment.length - at) if self._write else None,
                chunk_size=self._chunk_size,
                write=self._write,
                partition=self._partition,
            )
            pieces.append(reading)
            at += size
        return SegmentReading(pieces, segment.length)

    def _end_queue(self, *, written: bool) -> None:
        if not self._write:
            return
        if written:
            self._stream = flush(
                self._graphdef, self._params, self._stream, partition=self._partition
            )
        self._stream = reset_caches(self._graphdef, self._params, self._stream, pending=True)

    def _store(self) -> None:
        """Rounds the memory after a segment, as the release does after each of its calls."""
        if self._fast_weight_dtype != "float32":
            self._stream = store_memory(self._stream, dtype=self._fast_weight_dtype)

    def _new_stream(self) -> Stream:
        # Copied: the stream's buffers are donated, and the initial memory is needed again.
        memory = jax.tree.map(jnp.copy, self._initial_memory)
        return self._start(as_stored(memory, self._fast_weight_dtype))


@partial(
    jax.jit,
    static_argnames=("graphdef", "chunk_size", "write", "partition"),
    donate_argnames="stream",
)
def _read_piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None,
    *,
    chunk_size: int,
    write: bool,
    partition: Partition | None,
) -> tuple[Stream, PieceReading]:
    model = nnx.merge(graphdef, params)
    out = model.stream(
        tokens, stream, mask=mask, chunk_size=chunk_size, write=write, partition=partition
    )
    gates = {layer: facts.gate[0] for layer, facts in out.info.items()}
    slot_ids = {
        layer: facts.access.slot_ids[0]
        for layer, facts in out.info.items()
        if facts.measures is not None  # Only memories with slots have measures.
    }
    return out.stream, PieceReading(label_losses(out.logits, labels)[0], gates, slot_ids)
