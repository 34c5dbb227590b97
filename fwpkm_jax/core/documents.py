"""Where documents begin in rows that hold several, and what follows from it for each token.

Rows name their documents by `segment_ids [batch, length]`: a document is a run of equal ids, and 0
marks padding. Inside a model the same is said by `starts [batch, length]`, true at the first token
of each document, which needs no id of the token before.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.padding import Packing


class Documents(NamedTuple):
    """What rows say of their documents, `[batch, length]` each.

    Attributes:
      starts: true at the first token of each document; padding counts as one.
      real: false at padding.
    """

    starts: Bool[Array, "batch length"]
    real: Bool[Array, "batch length"]

    @classmethod
    def of(
        cls, segment_ids: Int[Array, "batch length"], *, before: Int[Array, " batch"] | None = None
    ) -> "Documents":
        """Of rows with these segment ids; `before` as in `document_starts`."""
        return cls(document_starts(segment_ids, before=before), segment_ids != 0)

    def mask(self, mask: TokenMask | None) -> Float[Array, "batch length"]:
        """1 for tokens that are real here and in `mask`."""
        real = self.real if mask is None else self.real & (mask != 0)
        return real.astype(jnp.float32)


def same_document(
    starts: Bool[Array, "batch length"], *, lookahead: int
) -> Bool[Array, "batch length"]:
    """Whether the token `lookahead` tokens on belongs to the same document."""
    numbers = document_numbers(starts)
    length = numbers.shape[1]
    # Padding of 0 could equal a number of 0; the last tokens are taken out by their index.
    behind = jnp.pad(numbers[:, lookahead:], ((0, 0), (0, min(lookahead, length))))
    return (numbers == behind) & (jnp.arange(length) < length - lookahead)[None]


def document_starts(
    segment_ids: Int[Array, "batch length"], *, before: Int[Array, " batch"] | None = None
) -> Bool[Array, "batch length"]:
    """True where a token's id is not that of the token before it.

    Args:
      segment_ids: document of each token; 0 for padding, which counts as a document.
      before: id of the token before the first, for a piece of a stream; None: the first token
        starts a document.

    Example:
      >>> document_starts(jnp.array([[1, 1, 2, 0]])).tolist()
      [[True, False, True, True]]
    """
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = (
        jnp.ones_like(segment_ids[:, 0], bool) if before is None else segment_ids[:, 0] != before
    )
    return jnp.concatenate([first[:, None], changes], axis=1)


def document_numbers(starts: Bool[Array, "batch length"]) -> Int[Array, "batch length"]:
    """How many documents have started up to each token; 0: the one from before still goes on."""
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32)


def document_positions(
    starts: Bool[Array, "batch length"], *, first: Int[Array, " batch"] | None = None
) -> Int[Array, "batch length"]:
    """Each token's position in its document, from 0.

    Args:
      first: position of the first token if it starts no document; None: 0.
    """
    place = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    # The index of the latest start so far; -1 while the document of before goes on.
    latest = jax.lax.cummax(jnp.where(starts, place, -1), axis=1)
    begun = jnp.zeros_like(latest[:, :1]) if first is None else first[:, None]
    return jnp.where(latest >= 0, place - latest, begun + place)


def pack_starts(
    starts: Bool[Array, "batch length"], packing: Packing | None
) -> Bool[Array, "batch length"]:
    """The starts of `core.padding.pack`'s tokens; a start at padding passes to the next token.

    Without packing, the starts as they are.
    """
    if packing is None:
        return starts
    numbers = jnp.take_along_axis(document_numbers(starts), packing.order, axis=1)
    # A start at padding shows as a larger number at the next token that is left.
    before = jnp.pad(numbers[:, :-1], ((0, 0), (1, 0)))
    return (numbers != before) & packing.is_real


def starts_at_real(
    starts: Bool[Array, "batch length"],
    mask: TokenMask,
) -> Bool[Array, "batch length"]:
    """The starts with those at padding moved to the next real token, if there is one.

    Args:
      mask: 0 at padding.
    """
    real, numbers = mask.astype(bool), document_numbers(starts)
    # The document of the latest real token; padding between two tokens hides no start.
    latest = jax.lax.cummax(jnp.where(real, numbers, 0), axis=1)
    return real & (numbers > jnp.pad(latest[:, :-1], ((0, 0), (1, 0))))


def segment_ids_from_cu_seqlens(
    cu_seqlens: Int[Array, " ends"], *, length: int
) -> Int[Array, "one length"]:
    """Segment ids 1, 2, ... `[1, length]` of one row from the documents' cumulative lengths.

    Args:
      cu_seqlens: `[documents + 1]`, 0 first, not decreasing; a repeated end is an empty document.
      length: of the row; tokens behind the last end are padding.

    Example:
      >>> segment_ids_from_cu_seqlens(jnp.array([0, 2, 3]), length=4).tolist()
      [[1, 1, 2, 0]]
    """
    place = jnp.arange(length, dtype=cu_seqlens.dtype)
    number = jnp.searchsorted(cu_seqlens, place, side="right").astype(jnp.int32)
    return jnp.where(place < cu_seqlens[-1], number, 0)[None]


def cu_seqlens_from_segment_ids(
    segment_ids: Int[Array, "one length"], *, max_documents: int
) -> Int[Array, " ends"]:
    """Cumulative lengths `[max_documents + 1]` of one row's documents; the last end is repeated.

    Args:
      segment_ids: `[1, length]`, padding (0) only behind the documents.
      max_documents: at least as many as the row has; the ends of others are lost.

    Raises:
      ValueError: there are several rows; lay them end to end with ids of their own.

    Example:
      >>> cu_seqlens_from_segment_ids(jnp.array([[7, 7, 8, 0]]), max_documents=3).tolist()
      [0, 2, 3, 3]
    """
    if segment_ids.shape[0] != 1:
        raise ValueError(
            f"segment_ids has {segment_ids.shape[0]} rows; cu_seqlens describe one: reshape to "
            "[1, -1], with other ids in each row."
        )
    starts, real = document_starts(segment_ids)[0], segment_ids[0] != 0
    total = jnp.sum(real, dtype=jnp.int32)
    (places,) = jnp.nonzero(starts & real, size=max_documents, fill_value=segment_ids.shape[1])
    return jnp.append(jnp.minimum(places.astype(jnp.int32), total), total)
