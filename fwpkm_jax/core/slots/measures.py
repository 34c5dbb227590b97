"""How evenly a memory's slots are used (section D.3 of the FwPKM paper)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class AccessMeasures(NamedTuple):
    """Statistics of a window of slot accesses.

    Attributes:
      collision: share of the accesses that went to slots read more than once.
      coverage: share of all slots read at least once.
      kld: Kullback-Leibler divergence of the accesses from uniform, in nats; ln(slots) at most.
    """

    collision: Float[Array, ""]
    coverage: Float[Array, ""]
    kld: Float[Array, ""]


def access_measures(
    slot_ids: Int[Array, "..."], num_slots: int, *, axes: tuple[str, ...] = ()
) -> AccessMeasures:
    """Collision, coverage and divergence from uniform of the accesses in `slot_ids`.

    Costs O(num_slots): call it once for a window of tokens, not per chunk.

    Args:
      slot_ids: one slot per access, any shape.
      axes: inside `jax.shard_map`, axes along which devices hold other accesses.

    References: Zhao and Jones 2026, arXiv:2601.00671, Table 4.
    """
    counts = jnp.zeros((num_slots,), jnp.float32).at[slot_ids.reshape(-1)].add(1.0)
    accesses = jnp.float32(slot_ids.size)
    if axes:
        counts, accesses = jax.lax.psum((counts, accesses), axes)
    probabilities = counts / accesses
    # 0 ln 0 = 0.
    logs = jnp.log(jnp.where(counts > 0, probabilities * num_slots, 1.0))
    return AccessMeasures(
        collision=jnp.sum(jnp.where(counts > 1, counts, 0.0)) / accesses,
        coverage=jnp.mean(jnp.where(counts > 0, 1.0, 0.0)),
        kld=jnp.sum(probabilities * logs),
    )
