"""Memories of many users over one base: forked, joined, taken apart, made private.

A forked memory goes wherever a memory goes on one device: into a decoder, a stream, `generate`.
What a user has not written is the base's and exists once; see `core.slots.options.overlay`. These
functions run on the host, not inside `jax.jit`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from fwpkm_jax.core.chunks import Memory, Shared, map_unshared
from fwpkm_jax.core.slots.options import overlay
from fwpkm_jax.core.slots.options.overlay import OverlayTable
from fwpkm_jax.models.language_model import LanguageModel


class OverlayUse(NamedTuple):
    """What the users of one layer have written.

    Attributes:
      rows: slots with a row of the user's own.
      capacity: rows that there is room for.
      lost: slots that found no room; above 0, this user reads NaN.
      bytes: of the rows in use and their numbers.
    """

    rows: Int[np.ndarray, " users"]
    capacity: int
    lost: Int[np.ndarray, " users"]
    bytes: Int[np.ndarray, " users"]


def fork_memory(
    model: LanguageModel, base: dict[str, Memory], *, users: int, capacity: int
) -> dict[str, Memory]:
    """Memories of many users who share one base, leaves `[users, ...]`; nothing is written yet.

    Args:
      base: one memory, leaves `[1, ...]`, as `LanguageModel.init_memory` makes or a run holds it.
      users: how many.
      capacity: slots of each layer that a user can write. A token writes at most
        `num_heads * top_k` slots, of SDM `num_heads * num_writes`, and often the same ones again.

    Raises:
      ValueError: the model's rule has no overlay, or base, users or capacity do not fit.

    Example:
      >>> import jax
      >>> from flax import nnx
      >>> from fwpkm_jax import FastWeightConfig, FwPKM, LanguageModel, ModelConfig
      >>> from fwpkm_jax.overlays import fork_memory, overlay_use
      >>> rule = FwPKM(num_subkeys=8, key_dim=8, value_dim=8, top_k=2)
      >>> config = ModelConfig(
      ...     vocab_size=32, model_dim=8, mlp_dim=8, mixers=("retnet",), memory_layers=(0,),
      ...     fast_weight=FastWeightConfig(rule=rule, chunk_size=4),
      ... )
      >>> model = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> base = model.init_memory(jax.random.key(1))
      >>> memory = fork_memory(model, base, users=3, capacity=16)
      >>> use = overlay_use(memory)["layer_0"]
      >>> use.rows.tolist(), use.capacity
      ([0, 0, 0], 16)
    """
    if users < 1:
        raise ValueError(f"users={users} must be at least 1.")
    one = to_overlay(model, base, base, capacity=capacity)
    return {
        name: map_unshared(lambda x: jnp.broadcast_to(x, (users, *x.shape[1:])), memory)
        for name, memory in one.items()
    }


def to_overlay(
    model: LanguageModel, memory: dict[str, Memory], base: dict[str, Memory], *, capacity: int
) -> dict[str, Memory]:
    """The users' memories over this base, from private ones or from those of another base.

    Args:
      memory: leaves `[users, ...]`.
      base: one memory, leaves `[1, ...]`.
      capacity: slots of each layer that a user can write, those that differ already included.

    Raises:
      ValueError: the model's rule has no overlay, a memory does not fit, or a user differs from the
        base in more than `capacity` slots.
    """
    rule = model.config.fast_weight.rule
    return {name: rule.overlay(own, base[name], capacity=capacity) for name, own in memory.items()}


def to_private(memory: Any) -> Any:
    """The same with a whole table for each user. Any tree that holds memories.

    Raises:
      ValueError: a user has lost rows.
    """
    refuse_lost(memory)
    return _map_overlays(lambda _, values: overlay.private_tables(values), memory)


def with_capacity(memory: Any, capacity: int) -> Any:
    """The same with room for `capacity` rows of each user. Any tree that holds memories.

    A call that reads n tokens of a user writes at most `n * num_heads * top_k` slots, those that
    waited before it included in n: with so many rows free beforehand nothing can be lost.

    Raises:
      ValueError: more rows are in use, or a user has lost rows.
    """
    refuse_lost(memory)
    return _map_overlays(lambda _, values: overlay.with_capacity(values, capacity), memory)


def join_users(memories: Sequence[Memory]) -> Memory:
    """One memory of the users of several, in order; they share a base and have one capacity.

    Raises:
      ValueError: the bases differ.
    """
    check_bases(memories)
    return map_unshared(lambda *x: jnp.concatenate(x), *memories)


def check_bases(memories: Sequence[Memory]) -> None:
    """Raises a ValueError unless all of these memories lie over one base."""
    bases = [[x.array for x in _parts(memory, Shared)] for memory in memories]
    for other in bases[1:]:
        if any(
            x is not y and not jnp.array_equal(x, y) for x, y in zip(bases[0], other, strict=True)
        ):
            raise ValueError(
                "These memories have different bases; join those of one fork, or give them one "
                "with overlays.to_overlay."
            )


def take_users(memory: Memory, users: Sequence[int]) -> Memory:
    """The memory of some users, by their numbers; they may repeat."""
    return map_unshared(lambda x: x[np.asarray(users)], memory)


def overlay_use(memory: dict[str, Memory]) -> dict[str, OverlayUse]:
    """What the users have written, by layer."""
    uses = {}
    for name, own in memory.items():
        for values in _parts(own, OverlayTable):
            row_bytes = values.rows.dtype.itemsize * values.rows.shape[-1]
            number_bytes = values.slots.dtype.itemsize + values.places.dtype.itemsize
            used = np.asarray(values.used)
            uses[name] = OverlayUse(
                *(used, values.capacity, np.asarray(values.lost)),
                bytes=used.astype(np.int64) * (row_bytes + number_bytes),
            )
    return uses


def refuse_lost(memory: Any) -> None:
    """Raises a ValueError if a user of any memory in this tree has lost rows."""
    _map_overlays(overlay.refuse_lost, memory)


def _map_overlays(function: Callable[[str, OverlayTable], Any], tree: Any) -> Any:
    def of(path: Any, x: Any) -> Any:
        if not isinstance(x, OverlayTable):
            return x
        return function(f"memory{jax.tree_util.keystr(path)}", x)

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=lambda x: isinstance(x, OverlayTable))


def _parts(tree: Any, kind: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]
