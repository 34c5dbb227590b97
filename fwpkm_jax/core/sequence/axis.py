"""The mesh axis along which each device holds a part of every sequence."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fwpkm_jax.core.array_types import TokenMask


@dataclass(frozen=True)
class SequenceAxis:
    """A mesh axis, to be used inside `jax.shard_map`; part i of each sequence is on its device i.

    The parts have equal lengths and follow each other in the order of the devices.
    """

    name: str
    size: int

    @property
    def index(self) -> Int[Array, ""]:
        """Which part this device holds."""
        return jax.lax.axis_index(self.name)

    def shift(self, tree: Any, *, by: int = 1) -> Any:
        """What the device `by` parts before holds; zeros on the first `by` devices."""
        pairs = [(source, source + by) for source in range(self.size - by)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.name, pairs), tree)

    def rotate(self, tree: Any) -> Any:
        """What the device before holds; on the first device, what the last one holds."""
        pairs = [(source, (source + 1) % self.size) for source in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.name, pairs), tree)

    def interleave_chunks(self, x: jax.Array, chunk_size: int) -> jax.Array:
        """An equal share of each chunk of the whole sequence, in place of whole chunks.

        A device sends all of its tokens but the share that it keeps.

        Args:
          x: this device's part `[groups, members, length, ...]`, which holds whole chunks.
          chunk_size: tokens of a chunk, a multiple of `size`; they become `chunk_size // size`.
        """
        chunks = x.reshape(*x.shape[:2], -1, chunk_size, *x.shape[3:])
        dealt = jax.lax.all_to_all(chunks, self.name, split_axis=3, concat_axis=2, tiled=True)
        return dealt.reshape(x.shape)

    def collect_chunks(self, x: jax.Array, chunk_size: int) -> jax.Array:
        """The inverse of `interleave_chunks`."""
        shares = x.reshape(*x.shape[:2], -1, chunk_size // self.size, *x.shape[3:])
        whole = jax.lax.all_to_all(shares, self.name, split_axis=2, concat_axis=3, tiled=True)
        return whole.reshape(x.shape)

    def sum_before(self, x: jax.Array) -> jax.Array:
        """The sum of the numbers on the devices before this one; 0 on the first."""
        every = jax.lax.all_gather(x, self.name)
        is_before = jnp.arange(self.size) < self.index
        is_before = is_before.reshape(-1, *[1] * x.ndim)
        return jnp.sum(jnp.where(is_before, every, 0), axis=0, dtype=x.dtype)

    def from_last(self, tree: Any) -> Any:
        """What the last device holds, on every device."""
        is_last = self.index == self.size - 1

        def send(x: jax.Array) -> jax.Array:
            return jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), self.name)

        return jax.tree.map(send, tree)


class Positions(NamedTuple):
    """Where the tokens of a part stand in their sequence.

    Attributes:
      positions: of each token in its document, -1 for padding.
      numbers: how many documents of the row have started up to each token; None: a row is one.
    """

    positions: Int[Array, "batch length"]
    numbers: Int[Array, "batch length"] | None


def positions_of_part(
    starts: Bool[Array, "batch length"] | None,
    *,
    axis: SequenceAxis,
    shape: tuple[int, ...],
    first: Int[Array, " batch"] | None = None,
    mask: TokenMask | None = None,
) -> Positions:
    """Positions and document numbers of this device's tokens, counted over the whole sequence.

    Devices exchange two numbers per sequence, and one more with a mask.

    Args:
      starts: true at the first token of each document; None: a row is one document.
      shape: sequences and tokens of the part.
      first: position of the sequence's first token if it starts no document; None: 0.
      mask: 0 at padding, which takes no position; no document starts there. None: all are real.
    """
    length = shape[1]
    if mask is None:
        place = axis.index * length + jnp.arange(length, dtype=jnp.int32)[None]
        place = jnp.broadcast_to(place.astype(jnp.int32), shape)
    else:
        real = (mask != 0).astype(jnp.int32)
        before = axis.sum_before(jnp.sum(real, axis=1, dtype=jnp.int32))
        place = before[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - real
    going_on = place if first is None else place + first[:, None]

    def of(positions: jax.Array, numbers: jax.Array | None) -> Positions:
        return Positions(
            positions if mask is None else jnp.where(mask != 0, positions, -1), numbers
        )

    if starts is None:
        return of(going_on, None)
    from fwpkm_jax.core.documents import document_numbers

    numbers = document_numbers(starts)
    latest = jax.lax.cummax(jnp.where(starts, place, -1), axis=1)
    every = jax.lax.all_gather((numbers[:, -1], latest[:, -1]), axis.name)  # [parts, batch]
    is_before = jnp.arange(axis.size)[:, None] < axis.index
    numbers = numbers + jnp.sum(jnp.where(is_before, every[0], 0), axis=0)[:, None]
    latest = jnp.maximum(latest, jnp.max(jnp.where(is_before, every[1], -1), axis=0)[:, None])
    return of(jnp.where(latest >= 0, place - latest, going_on), numbers)
