"""The meaning of product_top_k: `core.addressing`, which this only calls."""

from typing import NamedTuple

from jaxtyping import Array, Float

from fwpkm_jax.core import addressing
from fwpkm_jax.core.addressing import Address, Score
from fwpkm_jax.core.array_types import Queries, SubKeys


class Selection(NamedTuple):
    """Where each query reads, and with which weights.

    Attributes:
      address: best slots and best sub-keys with their scores.
      weights: read weights of the best slots.
    """

    address: Address
    weights: Float[Array, "tokens heads top_k"]


def address(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> Address:
    """The address that every implementation returns; see `core.addressing.product_top_k`."""
    return addressing.product_top_k(queries, keys, top_k=top_k, score=score)
