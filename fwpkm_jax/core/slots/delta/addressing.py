"""Which slots a token writes or reads, from its scores of all rows and of all columns."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.slots.keys.addressing import SubKeyChoice, best_pairs, top_k_ids


def best_slots(
    scores: Float[Array, "tokens heads 2 subkeys"], number: int
) -> tuple[Int[Array, "tokens heads {number}"], Float[Array, "tokens heads {number}"]]:
    """The slots of the largest sums of a row's and a column's score, best first, and the sums.

    A slot is row * subkeys + column. Of equal scores the lower sub-key, then the lower slot, comes
    first. Gradients reach the scores of the chosen slots.

    Args:
      scores: rows first.
      number: slots of each head, at most `subkeys`.
    """
    # Tokens last: the order in which a CPU finds the best.
    ids = jnp.moveaxis(top_k_ids(jnp.moveaxis(scores, 0, -1), number), -1, 0)
    best = jnp.take_along_axis(scores, ids, axis=-1)
    return best_pairs(SubKeyChoice(ids, best), num_subkeys=scores.shape[-1])
