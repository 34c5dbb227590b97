"""The definition of `product_top_k`, which calls `core.slots.addressing`."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, SubKeys
from fwpkm_jax.core.slots import addressing
from fwpkm_jax.core.slots.addressing import Address, Score, SubKeyChoice


class Selection(NamedTuple):
    """The slots that each query reads, and their weights.

    Attributes:
      address: best slots and best sub-keys with their scores.
      weights: read weights of the best slots.
    """

    address: Address
    weights: Float[Array, "tokens heads top_k"]


def address(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> Address:
    """The address that every implementation returns; see `core.slots.addressing.product_top_k`."""
    return addressing.product_top_k(queries, keys, top_k=top_k, score=score)


def choose_sub_keys(queries: Queries, keys: SubKeys, *, top_k: int, score: Score) -> SubKeyChoice:
    """The first half of `address`: each codebook's best sub-keys."""
    return addressing.best_sub_keys(queries, keys, top_k=top_k, score=score)


def pair_sub_keys(choice: SubKeyChoice, *, num_subkeys: int) -> tuple[jax.Array, jax.Array]:
    """The second half: ids and scores of the best slots."""
    return addressing.best_pairs(choice, num_subkeys=num_subkeys)
