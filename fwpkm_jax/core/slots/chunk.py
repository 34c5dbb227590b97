"""The chunk of a memory of slots, and what the memory reports about its reads."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import Cut


class SlotChunk(NamedTuple):
    """A `core.chunks.Chunk` with two fields for the slots.

    Attributes:
      query, target, write_weight, paired, counted, cut: see `core.chunks.Chunk`. Reads of tokens
        with `counted` = 1 count in a slot's number of accesses.
      addressed: `[tokens]`, weight of the token in the addressing loss's average.
      factor: `[tokens]`, multiplies the token's value step but not its loss, or None.
    """

    query: jax.Array
    target: jax.Array
    write_weight: jax.Array
    paired: jax.Array
    counted: jax.Array
    addressed: jax.Array
    factor: jax.Array | None = None
    cut: Cut | None = None

    @property
    def error_weight(self) -> jax.Array:
        """Weight of each token's error in the value step, `[tokens]`."""
        return self.write_weight if self.factor is None else self.factor * self.write_weight


class SlotAccess(NamedTuple):
    """Which slots each token read, heads joined, best first within a head."""

    slot_ids: Int[Array, "*tokens places"]
    slot_weights: Float[Array, "*tokens places"]


class SlotWriteWeights(NamedTuple):
    """`core.targets.WriteWeights` with the two further fields of a `SlotChunk`."""

    write: Float[Array, "batch length"]
    paired: Float[Array, "batch length"]
    counted: Float[Array, "batch length"]
    addressed: Float[Array, "batch length"]
    factor: Float[Array, "batch length"] | None = None
