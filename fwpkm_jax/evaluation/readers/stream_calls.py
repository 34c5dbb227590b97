"""Compiled calls on a model's stream, shared by all evaluations of a process.

A model's structure is a static argument, so all readers of one model share the compiled calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import Stream


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


def label_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Loss of each label `[batch, length]` in nats, from logits `[batch, length, vocab]`."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


@partial(jax.jit, static_argnames="dtype", donate_argnames="stream")
def store_memory(stream: Stream, *, dtype: FastWeightDtype) -> Stream:
    """The stream with its memories rounded to the precision of `dtype`."""
    return stream._replace(memory=as_stored(stream.memory, dtype))
