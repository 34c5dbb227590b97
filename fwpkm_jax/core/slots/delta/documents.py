"""Sparse Delta Memory over rows of several documents, each with a table of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.slots.delta.chunks import sparse_delta
from fwpkm_jax.core.slots.delta.definition import Decay, DeltaOutput, DeltaTokens
from fwpkm_jax.core.streams.documents import UnitSize, in_documents


def sparse_delta_in_documents(
    tables: Float[Array, "groups slots value"],
    tokens: DeltaTokens,
    starts: Bool[Array, "groups tokens"],
    *,
    fresh: Float[Array, "groups slots value"],
    decay: Decay = "slot",
    chunk_size: int = 64,
) -> DeltaOutput:
    """`chunks.sparse_delta` of rows in which documents start anew.

    Args:
      tables: before the first token; a document that goes on from an earlier call reads them.
      tokens: of each memory, leaves `[groups, tokens, ...]`.
      starts: first tokens of documents.
      fresh: the tables that documents start from.
      decay: of written slots.
      chunk_size: tokens computed at once.

    Returns:
      The tables of the last documents, and what each token read.
    """

    def within(table: Array, piece: Any, count: Int[Array, " rows"]) -> tuple[Array, Array]:
        piece = jax.tree.map(lambda x: x[:, 0], piece)
        own = jnp.arange(piece.strength.shape[1], dtype=jnp.int32)[None] < count[:, None]
        # Of other tokens nothing decays and nothing is corrected.
        still = {name: jnp.where(own, getattr(piece, name), 0.0) for name in _CHANGES}
        out = sparse_delta(table, piece._replace(**still), decay=decay, chunk_size=chunk_size)
        return out.table, out.output[:, None]

    groups, length = starts.shape
    none = jnp.zeros((groups,), jnp.int32)
    table, output = in_documents(
        within,
        tables,
        fresh,
        jax.tree.map(lambda x: x[:, None], tokens),
        count=none + length,
        starts=starts,
        # A document goes on from one unit to the next, so that units may have any size.
        unit=UnitSize(min(length, chunk_size)),
        position=none,
    )
    return DeltaOutput(table, output[:, 0])


_CHANGES = ("log_decay", "strength")  # By which a token changes a table.
