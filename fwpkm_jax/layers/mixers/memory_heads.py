"""Heads of the layers with a matrix memory."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.decay_starts import DecayStart
from fwpkm_jax.literals import Count, check_fields

KeyStart = Literal["own", "queries"]
"""Initial map to keys. own: drawn by itself. queries: a copy of the map to queries."""


@dataclass(frozen=True, kw_only=True)
class MemoryHeads:
    """Heads of a layer with a matrix memory; the sizes by default are the paper's."""

    num_key_heads: Count = 8
    """Heads of queries and keys."""
    num_value_heads: Count = 8
    """Heads of values, each with a memory; `num_value_heads / num_key_heads` share a key head."""
    key_head_dim: Count = 64
    """Width of a query or key."""
    value_head_dim: Count = 64
    """Width of a value."""
    conv_width: Count = 4
    """Tokens that the causal convolution sees, the token itself included."""
    decay_start: DecayStart = "time_steps"
    """Where learned decays begin. "time_steps", as published layers: each head draws its time step
    between 0.001 and 0.1. "constant": all heads have the same bias; with the gated delta rule,
    where it is the FwPKM paper's, the median head then forgets all but 1e-5 at every token."""
    key_start: KeyStart = "own"
    """Where the map to keys begins, with its convolution. "own": drawn apart from that to queries,
    as in published layers. "queries": as a copy of it, so that a question's query is near the key
    that it looks for before any training; then both are trained, each by itself. Of several keys
    per token the first begins so."""

    def __post_init__(self):
        check_fields(self)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}; value heads share key heads evenly."
            )


def keys_as_queries(
    weight: Float[Array, "inputs channels"], size: int
) -> Float[Array, "inputs channels"]:
    """A weight of all queries, all keys and more, with the `size` queries' columns as the keys'."""
    return weight.at[:, size : 2 * size].set(weight[:, :size])
