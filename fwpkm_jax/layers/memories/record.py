"""What a memory layer reports of a call."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fwpkm_jax.core.slots.measures import AccessMeasures, access_counts, measures_of_counts


class FastWeightInfo(NamedTuple):
    """What a memory layer did in one call.

    Attributes:
      memory_loss: mean over the paired tokens of gate-weighted mean squared error, before each
        chunk's write.
      token_loss: gate-weighted mean squared error of each token's read, 0 where it has no target.
      gate: of each token, 0 to 1: the share of the read in the output, or of the output.
      write: what the rule reports of its writes, its own NamedTuple, each field the mean over
        groups and chunks; None for a call that wrote by no chunk of the config's size: a frozen
        memory or a piece of a stream.
      access: what the rule reports of each token's read, leaves `[batch, length, ...]`, or None. A
        memory of slots has the fields `slot_ids` and `slot_weights`, `[batch, length, places]`.
      measures: how evenly this call used the slots; None for a memory without slots. O(slots) to
        compute, free when unused in jit.
      query: of each token, the one field with a gradient.
    """

    memory_loss: Float[Array, ""]
    token_loss: Float[Array, "batch length"]
    gate: Float[Array, "batch length"]
    write: Any
    access: Any
    measures: AccessMeasures | None
    query: Float[Array, "batch length heads key"]


def call_info(rule, signals, losses, paired, access, info, partition=None) -> FastWeightInfo:
    """The record of one call; `info` is the rule's, by group and chunk, or None without writes."""
    measures = None
    if rule.num_slots is not None:
        count = functools.partial(access_counts, num_slots=rule.num_slots)
        if partition is not None:  # Each device counts its own sequences' accesses.
            count = partition.run(
                lambda ids: jax.lax.psum(access_counts(ids, rule.num_slots), partition.token_axes),
                in_specs=partition.tokens(),
                out_specs=P(),
            )
        measures = measures_of_counts(count(access.slot_ids), access.slot_ids.size)
    facts = FastWeightInfo(
        memory_loss=jnp.sum(losses) / jnp.maximum(jnp.sum(paired), 1.0),
        token_loss=losses,
        gate=signals.gate,
        write=jax.tree.map(jnp.mean, info),
        access=access,
        measures=measures,
        query=signals.query,
    )
    return jax.lax.stop_gradient(facts)._replace(query=signals.query)
