"""Reads documents while all slow weights take gradient steps on them: dynamic evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fwpkm_jax.data import Document
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.gradient_steps import GradientSteps
from fwpkm_jax.evaluation.readers.segments import split_into_segments
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.readers.token_losses import TokenLosses, collect
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel


class DynamicReading(NamedTuple):
    """Losses and speed of one pass over some data sets.

    Attributes:
      losses: losses of all tokens.
      tokens_per_second: speed without the first call of each length, which may compile; None if
        there were no other calls.
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
    size = segment_length if steps is None else min(steps.chunk_length, segment_length)
    reader = StreamReader(
        model,
        {},
        write=True,
        piece_length=size,
        max_length=segment_length,
        steps=steps,
        pads=True,
        partition=partition,
    )
    compiled: set[int] = set()
    timed, seconds = 0, 0.0

    def read_chunk(tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
        nonlocal timed, seconds
        began = clock()
        losses = reader.read(tokens, labels).losses()
        if len(tokens) in compiled:  # The first call of a length may have compiled.
            timed += len(tokens)
            seconds += clock() - began
        compiled.add(len(tokens))
        return losses

    def segments(document: Document) -> Iterator[np.ndarray]:
        reader.reset_memory()
        if steps is not None and steps.reset == "document":
            reader.reset_weights()
        for start, length in split_into_segments(
            len(document.tokens), segment_length=segment_length
        ):
            reader.restart()
            inputs, labels = (document.tokens[start + k : start + k + length] for k in (0, 1))
            losses = [
                read_chunk(inputs[at : at + size], labels[at : at + size])
                for at in range(0, length, size)
            ]
            yield require_finite(np.concatenate(losses), where=document.id)

    losses = collect(
        (
            (number, document.id, segments(document))
            for number, documents in enumerate(sources)
            for document in documents
        ),
        forecast,
        what="the texts",
    )
    return DynamicReading(losses, timed / seconds if seconds else None)
