"""Reads documents while all slow weights take gradient steps on them: dynamic evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.data import Document
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.readers.devices import (
    check_one_stream,
    model_on_devices,
    padding_mask,
    parts_of,
)
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.segments import split_into_segments
from fwpkm_jax.evaluation.readers.stream_calls import label_losses, reset_caches
from fwpkm_jax.evaluation.readers.token_losses import TokenLosses
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.language_model import LanguageModel, Stream


@dataclass(frozen=True, kw_only=True)
class GradientSteps:
    """Gradient steps: `W <- W - learning_rate * gradient + decay * (trained W - W)` per chunk.

    The gradient is that of the chunk's mean loss. It does not reach back before the chunk: the
    caches of earlier chunks are constants.

    References: Krause et al. 2018, arXiv:1709.07432, Eq. 5.
    """

    learning_rate: float = 0.05
    """Learning rate of plain gradient descent."""
    decay: float = 0.0
    """Fraction of the distance to the trained weights by which each step moves back to them."""
    chunk_length: int = 64
    """Tokens per step."""
    reset: Literal["document", "never"] = "document"
    """When the weights are reset to the trained ones."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.learning_rate >= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be at least 0.")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in 0 to 1.")
        if self.chunk_length < 1:
            raise ValueError(f"chunk_length={self.chunk_length} must be at least 1.")


class DynamicReading(NamedTuple):
    """Losses and speed of one pass over some data sets.

    Attributes:
      losses: losses of all tokens.
      tokens_per_second: speed without the first call of each kind, which compiles; None if there
        were no other calls.
    """

    losses: TokenLosses
    tokens_per_second: float | None


def read_dynamically(
    model: LanguageModel,
    sources: Sequence[Iterator[Document]],
    *,
    segment_length: int,
    steps: GradientSteps | None,
    clock: Callable[[], float] = time.perf_counter,
    forecast: Forecast | None = None,
    partition: Partition | None = None,
) -> DynamicReading:
    """Reads documents in order with batch size 1; caches start empty in each segment.

    Args:
      model: a model without fast-weight memory, whose writes in a stream have no gradient. A Fast
        Weight Layer keeps its steps until the end of each document.
      sources: documents of each data set.
      segment_length: inputs of a segment.
      steps: the gradient steps; None keeps the weights fixed and reads whole segments.
      clock: returns the time in seconds.
      forecast: is told of the tokens that were read.
      partition: devices that each read a part of every chunk (`mesh.sequence`); None: one.

    Raises:
      ValueError: the model has a fast-weight memory, or there is nothing to predict.
    """
    if model.config.memory_layers:
        raise ValueError(
            f"The model has fast-weight memories in layers {model.config.memory_layers}, whose "
            "writes in a stream have no gradient; choose a model with memory_layers=()."
        )
    reader = _Reader(model, segment_length, steps, clock, partition)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    document_ids: list[str] = []
    for number, documents in enumerate(sources):
        for document in documents:
            for index, losses in enumerate(reader.read(document.tokens)):
                require_finite(losses, where=document.id)
                size = len(losses)
                columns["source"].append(np.full(size, number, np.int8))
                columns["document"].append(np.full(size, len(document_ids), np.int32))
                columns["segment"].append(np.full(size, index, np.int32))
                columns["position"].append(np.arange(size, dtype=np.int32))
                columns["loss"].append(losses)
                if forecast is not None:
                    forecast.add(size)
            document_ids.append(document.id)
    if not columns["loss"]:
        raise ValueError("No document has the two tokens that a prediction needs.")
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    return DynamicReading(TokenLosses(**arrays, document_ids=document_ids), reader.speed)


_COLUMNS = ("source", "document", "segment", "position", "loss")


class _Reader:
    """One pass: the current weights, and the time that reading took."""

    def __init__(self, model, segment_length, steps, clock, partition):
        check_one_stream(partition, "Dynamic evaluation")
        model, self._partition = model_on_devices(partition, model), partition
        self._graphdef, self._trained = nnx.split(model)
        self._params = self._trained
        self._start = partial(model.init_stream, {}, batch=1, max_length=segment_length)
        self._segment_length, self._steps, self._clock = segment_length, steps, clock
        # Arguments of the compiled function, so that other rates need no compilation.
        self._rates = None if steps is None else (steps.learning_rate, steps.decay)
        self._compiled: set[bool] = set()
        self._tokens, self._seconds = 0, 0.0

    @property
    def speed(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    def read(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """Each segment's losses in nats, `[length]`, in order."""
        stream = self._start()
        if self._steps is not None and self._steps.reset == "document":
            self._params = self._trained
        size = self._segment_length if self._steps is None else self._steps.chunk_length
        size = min(size, self._segment_length)
        for segment in split_into_segments(len(tokens), segment_length=self._segment_length):
            stream = reset_caches(self._graphdef, self._params, stream, pending=False)
            losses = []
            for first in range(segment.start, segment.start + segment.length, size):
                end = min(first + size, segment.start + segment.length)
                stream, piece = self._read_chunk(stream, tokens[first : end + 1], size)
                losses.append(piece)
            yield np.concatenate(losses)

    def _read_chunk(self, stream: Stream, tokens: np.ndarray, size: int):
        length, parts = len(tokens) - 1, parts_of(self._partition)
        size = -(-size // parts) * parts
        padded = np.zeros((1, size + 1), np.int32)
        padded[0, : length + 1] = tokens
        mask = padding_mask(size, real=length)
        began = self._clock()
        self._params, stream, losses = _read(
            *(self._graphdef, self._params, self._trained, stream, padded, mask, self._rates),
            partition=self._partition,
        )
        losses = np.asarray(losses)[:length]
        if (mask is None) in self._compiled:
            self._tokens += length
            self._seconds += self._clock() - began
        self._compiled.add(mask is None)
        return stream, losses


@partial(jax.jit, static_argnames=("graphdef", "partition"), donate_argnames="stream")
def _read(
    graphdef: Any,
    params: Any,
    trained: Any,
    stream: Stream,
    tokens: jax.Array,
    mask: jax.Array | None,
    rates: tuple[float, float] | None,
    *,
    partition: Partition | None,
) -> tuple[Any, Stream, jax.Array]:
    """New weights, the stream, and losses `[length]` of `tokens [1, length + 1]`.

    The losses are those of the weights before the step.
    """

    def loss(params: Any) -> tuple[jax.Array, tuple[Stream, jax.Array]]:
        model = nnx.merge(graphdef, params)
        out = model.stream(tokens[:, :-1], stream, mask=mask, partition=partition)
        losses = label_losses(out.logits, tokens[:, 1:])
        counted = jnp.ones_like(losses) if mask is None else mask
        return jnp.sum(losses * counted) / jnp.sum(counted), (out.stream, losses[0])

    if rates is None:
        return params, *loss(params)[1]
    learning_rate, decay = rates
    gradients, (stream, losses) = jax.grad(loss, has_aux=True)(params)

    def step(weight: jax.Array, gradient: jax.Array, trained: jax.Array) -> jax.Array:
        return weight - learning_rate * gradient + decay * (trained - weight)

    return jax.tree.map(step, params, gradients, trained), stream, losses
