"""Evaluations whose texts lie over several devices."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fwpkm_jax.layers.partition import BATCH, HEADS, SEQUENCE, Partition
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.models.sharding import parameter_shardings


def model_on_devices(partition: Partition | None, model: LanguageModel) -> LanguageModel:
    """The model with its weights laid out over the devices; None: the model as it is."""
    if partition is None:
        return model
    graphdef, params = nnx.split(model)
    params = jax.device_put(params, parameter_shardings(partition, params))
    return nnx.merge(graphdef, params)


def memory_on_devices(partition: Partition | None, memory: Memory) -> Memory:
    """The memory, whole on every device; None: the memory as it is."""
    return memory if partition is None else jax.device_put(memory, partition.sharding())


def check_one_stream(partition: Partition | None, what: str) -> None:
    """Raises ValueError if the devices cannot share the one stream that `what` reads."""
    if partition is None:
        return
    if partition.size(*BATCH) > 1:
        sizes = " x ".join(f"mesh.{axis}={partition.size(axis)}" for axis in BATCH)
        raise ValueError(
            f"{what} reads one sequence at a time, which {sizes} cannot share; put these devices "
            "along mesh.sequence."
        )
    if partition.sequence is None:
        raise ValueError(
            f"{what} reads one sequence at a time, of which devices share the tokens first; set "
            "mesh.sequence to 2 or more."
        )
    if partition.memory != "independent":
        raise ValueError(
            f"mesh.memory={partition.memory!r}: {what} keeps the memory whole on every device; set "
            "mesh.memory=independent."
        )


class Rows(NamedTuple):
    """Rows as a model takes them.

    Attributes:
      tokens: `[batch, padded length]`.
      options: further arguments of the model.
    """

    tokens: jax.Array
    options: dict[str, Any]


def rows_on_devices(
    partition: Partition | None, model: LanguageModel, tokens: jax.Array, memory: Memory
) -> Rows:
    """Rows of any length `[batch, length]`, with padding behind so that they divide into parts.

    Raises:
      ValueError: the rows or memories do not divide into the mesh.
    """
    if partition is None:
        return Rows(tokens, {})
    batch, length = tokens.shape
    partition.check_divides("Rows of a batch", batch, *BATCH)
    unit = partition.size(SEQUENCE, HEADS)
    if memory:
        if jax.tree.leaves(memory)[0].shape[0] > 1 and partition.memory != "independent":
            raise ValueError(
                f"mesh.memory={partition.memory!r} with several memories in an evaluation; set "
                "mesh.memory=independent."
            )
        # Devices have whole chunks.
        unit = math.lcm(unit, partition.size(SEQUENCE) * model.config.fast_weight.chunk_size)
    padded = -(-length // unit) * unit
    if padded == length:
        return Rows(tokens, {"partition": partition})
    real = jnp.broadcast_to(jnp.arange(padded)[None] < length, (batch, padded))
    tokens = jnp.pad(tokens, ((0, 0), (0, padded - length)))
    return Rows(tokens, {"partition": partition, "mask": real.astype(jnp.float32)})
