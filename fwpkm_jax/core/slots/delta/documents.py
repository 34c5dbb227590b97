"""Sparse Delta Memory over rows of several documents, each with a table of its own.

A slot of one document is another row than the same slot of the next. So the rows that the tokens
touch, numbered by document and slot, are one table of copies that all documents write as they
come. No table is copied where a document starts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.documents import document_numbers
from fwpkm_jax.core.slots.delta.chunks import sparse_delta
from fwpkm_jax.core.slots.delta.definition import Decay, DeltaOutput, DeltaTokens
from fwpkm_jax.core.slots.values.exchange import PLAIN_SUMS, RowSums
from fwpkm_jax.core.streams.cuts import select


class TouchedRows(NamedTuple):
    """The rows that tokens touch, each once for every document that touches it.

    Attributes:
      slots: of each row; 0 behind the last row in use.
      documents: of each row; -1 behind the last row in use.
      rank: the row of each reference.
    """

    slots: Int[Array, "groups rows"]
    documents: Int[Array, "groups rows"]
    rank: Int[Array, "groups tokens places"]


def sparse_delta_in_documents(
    tables: Float[Array, "groups slots value"],
    tokens: DeltaTokens,
    starts: Bool[Array, "groups tokens"],
    *,
    fresh: Float[Array, "groups slots value"],
    decay: Decay = "slot",
    chunk_size: int = 64,
    sums: RowSums = PLAIN_SUMS,
) -> DeltaOutput:
    """`chunks.sparse_delta` of rows in which documents start anew.

    Args:
      tables: before the first token; a document that goes on from an earlier call reads them.
      tokens: of each memory, leaves `[groups, tokens, ...]`.
      starts: first tokens of documents.
      fresh: the tables that documents start from.
      decay, chunk_size, sums: as there.

    Returns:
      The tables of the last documents, and what each token read.
    """
    numbers, writes = document_numbers(starts), tokens.write_ids.shape[-1]
    touched = _touched(
        jnp.concatenate([tokens.write_ids, tokens.read_ids], axis=-1).astype(jnp.int32), numbers
    )
    of_slots = jax.vmap(lambda table, slots: table.at[slots].get(mode="promise_in_bounds"))
    goes_on = (touched.documents == 0)[..., None]
    rows = jnp.where(goes_on, of_slots(tables, touched.slots), of_slots(fresh, touched.slots))
    write_ids, read_ids = touched.rank[..., :writes], touched.rank[..., writes:]
    tokens = tokens._replace(write_ids=write_ids, read_ids=read_ids)
    rows, output = sparse_delta(rows, tokens, decay=decay, chunk_size=chunk_size, sums=sums)
    last = numbers[:, -1:]
    # Rows of earlier documents go nowhere, each to another place outside the table.
    outside = tables.shape[1] + jnp.arange(rows.shape[1], dtype=jnp.int32)
    into = jnp.where(touched.documents == last, touched.slots, outside)
    put = jax.vmap(lambda table, at, rows: table.at[at].set(rows, mode="drop", unique_indices=True))
    return DeltaOutput(put(select(last[:, 0] > 0, fresh, tables), into, rows), output)


def _touched(
    slot_ids: Int[Array, "groups tokens places"], documents: Int[Array, "groups tokens"]
) -> TouchedRows:
    groups, *_ = slot_ids.shape
    documents = jnp.broadcast_to(documents[..., None], slot_ids.shape).reshape(groups, -1)
    slots, references = slot_ids.reshape(groups, -1), jnp.arange(documents.shape[1])
    order = jnp.broadcast_to(references.astype(jnp.int32), slots.shape)
    documents, slots, order = jax.lax.sort((documents, slots, order), num_keys=2)
    begins = (jnp.diff(documents, axis=1) != 0) | (jnp.diff(slots, axis=1) != 0)
    row = jnp.cumsum(jnp.pad(begins, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
    # All references of a row agree, so that their order makes no difference.
    put = jax.vmap(lambda empty, at, x: empty.at[at].set(x))
    rank = put(jnp.zeros_like(row), order, row).reshape(slot_ids.shape)
    empty = jnp.zeros_like(row)
    return TouchedRows(put(empty, row, slots), put(empty - 1, row, documents), rank)
