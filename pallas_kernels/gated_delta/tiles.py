"""Operations on two-dimensional tiles inside kernels: products, masks, sums; for all devices.

Several heads lie side by side along the lanes, `[rows, heads * width]`, so that heads of 64 numbers
fill a unit of 128 x 128 and all lanes of a vector. A vector with one number per token of a chunk is
a row `[1, heads * chunk]`, or one column `[chunk, 1]` for each head.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fwpkm_jax.core.numerics import compute_dtype

LANES = 128

Columns = tuple[jax.Array, ...]
"""One column `[rows, 1]` for each head."""


class SideBySide(NamedTuple):
    """Operations on tiles that hold so many heads side by side."""

    heads: int = 1
    rounded: bool = False
    """Whether products round their operands to bfloat16, for arguments that are in bfloat16."""

    def product(
        self, a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)
    ) -> jax.Array:
        """Each head's product of its parts of two tiles, side by side.

        Args:
          a: a tile.
          b: another tile.
          contract: the axes of a head's parts of `a` and `b` to sum over: (1, 0), (1, 1) or (0, 0).
        """
        if self.rounded:
            a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        if self.heads == 1:
            return product(a, b, contract=contract)
        width_a, width_b = a.shape[1] // self.heads, b.shape[1] // self.heads
        columns = b.shape[0] if contract == (1, 1) else width_b
        if not (width_a % LANES or width_b % LANES or columns % LANES):
            # Every head fills the unit by itself.
            parts = zip(self.split(a), self.split(b), strict=True)
            return jnp.concatenate([product(*x, contract=contract) for x in parts], axis=1)
        if contract != (0, 0):
            # One factor stands below the diagonal blocks of the other: no head meets another.
            return product(a, jnp.concatenate(self._alone(b), axis=0), contract=contract)
        # All heads with all heads; the blocks on the diagonal are each head with itself.
        rows = jnp.split(product(a, b, contract=contract), self.heads, axis=0)
        return self.choose(rows, width_b)

    def careful_product(
        self, a: jax.Array, b: jax.Array, *, terms: int = 2, contract: tuple[int, int] = (1, 0)
    ) -> jax.Array:
        """`product` of operands that are not rounded: to 2^-17 with two terms, 2^-24 with three.

        Each operand is a sum of bfloat16 terms, of which one in bfloat16 has one; the products of
        small terms are left out.
        """
        if not self.rounded:
            return self.product(a, b, contract=contract)
        pairs = [
            (left, right)
            for i, left in enumerate(_terms(a, terms))
            for j, right in enumerate(_terms(b, terms))
            if i + j < terms
        ]
        products = [self.product(*pair, contract=contract) for pair in reversed(pairs)]
        return functools.reduce(operator.add, products)

    def split(self, tile: jax.Array) -> list[jax.Array]:
        """Each head's part `[rows, width]` of a tile."""
        return jnp.split(tile, self.heads, axis=1)

    def choose(self, of_heads: Columns | list[jax.Array], width: int) -> jax.Array:
        """The first lanes of the first array, the next ones of the second, and so on.

        Args:
          of_heads: for each head an array of `heads * width` lanes, or a column.
          width: lanes of a head.

        Returns:
          `[rows, heads * width]`; for one head its array itself, a column too.
        """
        chosen, *others = of_heads
        for head, other in enumerate(others, 1):
            lane = lanes((other.shape[0], self.heads * width))
            chosen = jnp.where(lane < head * width, chosen, other)
        return chosen

    def scale(self, columns: Columns, tile: jax.Array) -> jax.Array:
        """The tile with every row of every head multiplied by that head's column."""
        return self.choose(columns, tile.shape[1] // self.heads) * tile

    def sums(self, tile: jax.Array) -> Columns:
        """The sums over the lanes of each head."""
        return tuple(row_sum(x) for x in self._alone(tile))

    def columns(self, row: jax.Array) -> Columns:
        """A row as columns, by masked sums: Pallas cannot transpose such a thin tile."""
        r, c = self.positions(row.shape[1] // self.heads)
        return self.sums(jnp.where(r == c, row, 0.0))

    def row(self, columns: Columns) -> jax.Array:
        """Columns as a row."""
        size = columns[0].shape[0]
        r, c = self.positions(size)
        return column_sum(jnp.where(r == c, self.choose(columns, size), 0.0))

    def positions(self, size: int) -> tuple[jax.Array, jax.Array]:
        """Row and column number of every entry of the heads' square tiles; size a power of two."""
        row = jax.lax.broadcasted_iota(jnp.int32, (size, self.heads * size), 0)
        return row, lanes(row.shape) & (size - 1)

    def _alone(self, tile: jax.Array) -> list[jax.Array]:
        """For each head the tile with zeros in the lanes of the others."""
        if self.heads == 1:
            return [tile]
        width, lane = tile.shape[1] // self.heads, lanes(tile.shape)
        return [
            jnp.where((lane >= head * width) & (lane < (head + 1) * width), tile, 0)
            for head in range(self.heads)
        ]


ALONE = SideBySide()
"""One head."""


def each(function: Callable[..., jax.Array], *columns: Columns) -> Columns:
    """The function of each head's columns."""
    return tuple(function(*of_head) for of_head in zip(*columns, strict=True))


def product(a: jax.Array, b: jax.Array, *, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product of two tiles, in float32 or float64.

    Float32 operands are multiplied at the highest precision. Two bfloat16 operands need one pass
    only, because their products are exact in float32.

    Args:
      a: a tile.
      b: another tile.
      contract: the axes of `a` and `b` to sum over.
    """
    exact = a.dtype == b.dtype == jnp.bfloat16
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if exact else jax.lax.Precision.HIGHEST,
        preferred_element_type=compute_dtype(a.dtype),
    )


def _terms(x: jax.Array, count: int) -> list[jax.Array]:
    """Bfloat16 tiles whose sum is the tile."""
    terms = [x.astype(jnp.bfloat16)]
    while x.dtype != jnp.bfloat16 and len(terms) < count:
        x = x - terms[-1].astype(x.dtype)
        terms.append(x.astype(jnp.bfloat16))
    return terms


def lanes(shape: tuple[int, ...]) -> jax.Array:
    """The number of its lane for every entry of a tile."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def mask(where: jax.Array, like: jax.Array) -> jax.Array:
    """1 where `where` is True, else 0, in the dtype of `like`."""
    return jnp.where(where, jnp.ones((), like.dtype), jnp.zeros((), like.dtype))


def wide(*arrays: jax.Array) -> list[jax.Array]:
    """Converts the arrays to the dtype of computation: float32, or float64 for float64 arrays."""
    return [x.astype(compute_dtype(x.dtype)) for x in arrays]


def row_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def column_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0, keepdims=True)
