"""Sparse Delta Memory on one page: what each token writes to a table of slots, and what it reads.

This is the definition in plain JAX, token by token, to read and to test against.
`core.slots.delta.chunks.sparse_delta` computes the same, gradients included, a chunk at a time.

How a token comes by its slots and weights is not part of it: `rules.sdm.SDM` chooses them by
product keys, before the table is known.

References: Cabannes et al. 2026, arXiv:2607.07386, section 3.1, Eqs. 3 to 5. The gated delta rule
is that of Yang et al. 2024, arXiv:2412.06464.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import ValueTable

Decay = Literal["slot", "weighted"]
"""How much a written slot decays. slot: by the token's decay. weighted: by its decay to the power
of the slot's write weight. All other slots keep what they hold."""

FirstTable = Literal["zeros", "learned"]
"""What a table starts from: zeros, or a parameter of the layer that holds the memory."""


class DeltaTokens(NamedTuple):
    """What each token of one memory writes and reads, leaves `[tokens, ...]`.

    Slots may occur more than once, also within one token: their weights then add up.

    Attributes:
      write_ids: slots that the token writes, `[tokens, writes]`.
      write_weights: k, `[tokens, writes]`.
      read_ids: slots that the token reads, `[tokens, reads]`.
      read_weights: q, `[tokens, reads]`.
      values: v, what reading under k should give, `[tokens, value]`.
      log_decay: g, log of the share that written slots keep, at most 0, `[tokens]`.
      strength: b, share of the error that is corrected, `[tokens]`.
    """

    write_ids: Int[Array, "*n writes"]
    write_weights: Float[Array, "*n writes"]
    read_ids: Int[Array, "*n reads"]
    read_weights: Float[Array, "*n reads"]
    values: Float[Array, "*n value"]
    log_decay: Float[Array, "*n"]
    strength: Float[Array, "*n"]


class DeltaOutput(NamedTuple):
    """The table after the last token, and what each token read."""

    table: Float[Array, "*groups slots value"]
    output: Float[Array, "*tokens value"]


def write_and_read(table: ValueTable, tokens: DeltaTokens, *, decay: Decay = "slot") -> DeltaOutput:
    """The table after all tokens, and what each of them read right after its own write.

        M[s] <- exp(g) M[s]              of the slots s that the token writes
        r = sum of k[n] M[s[n]]          what the write weights read
        M[s[n]] <- M[s[n]] + k[n] b (v - r)
        y = sum of q[m] M[s[m]]          the read slots, after the write

    Args:
      table: M before the first token, `[slots, value]`.
      tokens: in order. A token with decay and strength 0 leaves the table as it is.
      decay: of written slots.

    Returns:
      The table, and y `[tokens, value]`.
    """

    def token(table: ValueTable, at: DeltaTokens) -> tuple[ValueTable, Array]:
        # As vectors over all slots, in which repeated slots add up.
        zeros = jnp.zeros(table.shape[:1], table.dtype)
        k = zeros.at[at.write_ids].add(at.write_weights)
        q = zeros.at[at.read_ids].add(at.read_weights)
        written = k if decay == "weighted" else zeros.at[at.write_ids].set(1.0)
        table = jnp.exp(at.log_decay * written)[:, None] * table  # Eq. 3
        error = at.strength * (at.values - k @ table)
        table = table + jnp.outer(k, error)  # Eq. 4
        return table, q @ table  # Eq. 5

    return DeltaOutput(*jax.lax.scan(token, table, tokens))
