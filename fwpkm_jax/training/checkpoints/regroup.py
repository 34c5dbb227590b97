"""A checkpoint's memories in a run that has another number of them."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

Regroup = Literal["refuse", "first", "mean"]
"""What becomes of memories where several are to be one: the first of them, or their mean."""


def regroup(memory: Any, groups: int, how: Regroup) -> Any:
    """Memories, leaves `[saved, ...]`, for a run with `groups` of them, leaves `[groups, ...]`.

    A batch belongs to its memories in consecutive runs of sequences, and a place in the batch keeps
    its memory as far as it can. Of more memories than were saved, neighbours start as copies of the
    one that they share the place of. Of fewer, each stands for several neighbours: it is the first
    of them, the others being dropped, or their mean, array by array.

    Raises:
      ValueError: the numbers differ and `how` is refuse, or neither divides the other.
    """
    saved = jax.tree.leaves(memory)[0].shape[0]
    if saved == groups:
        return memory
    if how == "refuse":
        raise ValueError(
            f"The checkpoint holds {saved} memories, but memory.groups={groups}. To make the one "
            "of the other, set checkpoint.regroup: copies where there are to be more; where fewer, "
            "first keeps the first of those that become one, mean takes their mean."
        )
    if max(saved, groups) % min(saved, groups):
        raise ValueError(
            f"The checkpoint's {saved} memories cannot become memory.groups={groups}; choose a "
            f"multiple or a divisor of {saved}."
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
    """The first of the memories, leaves `[1, ...]`, on all devices that hold any."""
    layout = jax.tree.map(lambda x: all_groups(x.sharding), memory)
    return jax.jit(lambda memory: jax.tree.map(lambda x: x[:1], memory), out_shardings=layout)(
        memory
    )


def all_groups(sharding: Any) -> Any:
    """The layout of a memory's array with every group on all the devices that share the groups."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(None, *sharding.spec[1:]))
