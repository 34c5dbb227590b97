"""The definition of `product_top_k`, from `fwpkm_jax.core.slots.keys.addressing`."""

from typing import NamedTuple

from jaxtyping import Array, Float

from fwpkm_jax.core.slots.keys.addressing import Address
from fwpkm_jax.core.slots.keys.addressing import best_pairs as pair_sub_keys
from fwpkm_jax.core.slots.keys.addressing import best_sub_keys as choose_sub_keys
from fwpkm_jax.core.slots.keys.addressing import product_top_k as address

__all__ = ["Selection", "address", "choose_sub_keys", "pair_sub_keys"]


class Selection(NamedTuple):
    """The slots that each query reads, and their weights.

    Attributes:
      address: best slots and best sub-keys with their scores.
      weights: read weights of the best slots.
    """

    address: Address
    weights: Float[Array, "tokens heads top_k"]
