"""Reads long texts into the memory with one write per reading, and decodes answers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.evaluation.segments import cut_into_pieces, piece_sizes
from fwpkm_jax.evaluation.stream_calls import flush, reset_caches
from fwpkm_jax.models.language_model import LanguageModel, Memory, Stream


class HaystackReader:
    """A stream of batch 1 whose memory is written when it is told to.

    The chunk size is the queue's capacity, which no reading reaches, so nothing falls due by
    itself; `write` then writes all waiting pairs at once. This is a chunk of the text's length
    without a compilation for every length.
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
    ):
        """Prepares a stream.

        Args:
          model: the language model.
          memory: fast weights, leaves `[1, ...]`.
          capacity: tokens that may wait for one write.
          max_length: tokens that full attention must keep.
          piece_length: tokens read per call.
          vocab_size: ids that an answer may hold; the model's table may be larger.
          write: False never writes.
        """
        self._writes = write
        self._sizes = piece_sizes(piece_length)
        self._graphdef, self._params = nnx.split(model)
        self._options = {"chunk_size": capacity, "write": write, "vocab_size": vocab_size}
        self._start = partial(
            model.init_stream, batch=1, max_length=max_length, max_chunk_size=capacity
        )
        self._initial_memory = memory
        self.reset_memory()

    def reset_memory(self) -> None:
        """Starts from the initial memory with nothing waiting."""
        # Copied because the stream's buffers are donated and these are needed again.
        self._stream = self._start(jax.tree.map(jnp.copy, self._initial_memory))

    def restart(self) -> None:
        """Empties attention and GDN caches; memory and waiting tokens stay."""
        self._stream = reset_caches(self._graphdef, self._params, self._stream, pending=False)

    def read(self, tokens: np.ndarray) -> None:
        """Reads `[length]` tokens behind those read since `restart`."""
        at = 0
        for size in cut_into_pieces(len(tokens), self._sizes):
            piece = np.asarray(tokens[None, at : at + size], np.int32)
            self._next, self._stream = _read_piece(
                self._graphdef, self._params, self._stream, piece, **self._options
            )
            at += size

    def write(self) -> None:
        """Writes all waiting pairs as one chunk."""
        if self._writes:
            self._stream = flush(self._graphdef, self._params, self._stream)

    def next_token(self) -> int:
        """The most likely token behind those read."""
        return int(self._next)

    def decode(self, first: int, *, length: int) -> list[int]:
        """`length` tokens, greedily: `first`, then the most likely one behind each."""
        tokens = [first]
        while len(tokens) < length:
            self.read(np.asarray(tokens[-1:]))
            tokens.append(self.next_token())
        return tokens

    @property
    def stream(self) -> Stream:
        """The stream as it is now; the next call reuses its buffers."""
        return self._stream


@partial(
    jax.jit,
    static_argnames=("graphdef", "chunk_size", "write", "vocab_size"),
    donate_argnames="stream",
)
def _read_piece(
    graphdef: Any,
    params: Any,
    stream: Stream,
    tokens: jax.Array,
    *,
    chunk_size: int,
    write: bool,
    vocab_size: int,
) -> tuple[jax.Array, Stream]:
    """The most likely token behind `tokens` `[1, length]`, and the stream behind them."""
    out = nnx.merge(graphdef, params).stream(tokens, stream, chunk_size=chunk_size, write=write)
    return jnp.argmax(out.logits[0, -1, :vocab_size]), out.stream
