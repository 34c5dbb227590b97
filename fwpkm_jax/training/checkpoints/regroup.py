"""Adapts a checkpoint's memories to a run with another number of memory groups."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Regroup = Literal["refuse", "first", "mean"]
"""How several memories become one: the first of them, or their mean. refuse: an error."""


def regroup(memory: Any, groups: int, how: Regroup) -> Any:
    """Changes memories with leaves `[saved, ...]` to leaves `[groups, ...]`.

    Each memory serves a run of consecutive sequences of the batch, so a new memory takes over from
    the saved memories that served the same sequences. If there are more groups than saved memories,
    each saved memory is copied to neighbouring groups. If there are fewer, each group gets the
    first of its saved memories, or their mean, array by array.

    Args:
      memory: fast weights, leaves `[saved, ...]`.
      groups: number of memories to make.
      how: how several memories become one.

    Raises:
      ValueError: the numbers differ and `how` is refuse, or neither number divides the other.
    """
    saved = jax.tree.leaves(memory)[0].shape[0]
    if saved == groups:
        return memory
    if how == "refuse":
        raise ValueError(
            f"The checkpoint holds {saved} memories, but training.memory.groups={groups}. To "
            "convert them, set checkpoint.regroup to first or mean: more groups get copies of "
            "the saved ones, fewer groups get the first or the mean of the memories that they "
            "replace."
        )
    if max(saved, groups) % min(saved, groups):
        raise ValueError(
            f"The checkpoint's {saved} memories cannot become training.memory.groups={groups}; "
            f"choose a multiple or a divisor of {saved}."
        )
    if saved < groups:
        return jax.tree.map(lambda x: jnp.repeat(x, groups // saved, axis=0), memory)

    def merge(x: jax.Array) -> jax.Array:
        neighbours = x.reshape(groups, saved // groups, *x.shape[1:])
        if how == "first":
            return neighbours[:, 0]
        return jnp.mean(neighbours, axis=1, dtype=jnp.float32).astype(x.dtype)

    return jax.tree.map(merge, memory)


def first_memory(memory: Any) -> Any:
    """The first memory, leaves `[1, ...]`, on all devices that hold memories."""
    layout = jax.tree.map(lambda x: all_groups(x.sharding), memory)
    return jax.jit(lambda memory: jax.tree.map(lambda x: x[:1], memory), out_shardings=layout)(
        memory
    )


def all_groups(sharding: Any) -> Any:
    """The layout of a memory's array without a split of its groups over devices."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(None, *sharding.spec[1:]))
