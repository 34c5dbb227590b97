"""Float32 tiles on Hopper's tensor cores: splits them in two halves and multiplies with wgmma.

wgmma has no float32 products and cannot transpose 32-bit operands. For float32 arguments each
operand is therefore the sum of two bfloat16 halves, `hi + lo`, and a product is
`hi hi + hi lo + lo hi` in a float32 accumulator. The omitted term is about 2^-17 of the product.

For bfloat16 arguments operands have no low half: each is rounded once, to 2^-9, and a product is
one. Sums, decays, the memory that is carried on and the inverse of the triangle keep float32's
precision; arrays between the stages are bfloat16.

Every program is one warpgroup. Registers hold tiles in the layout of wgmma's accumulators.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import interpreted

LAYOUT = plgpu.Layout.WGMMA
COLUMN = LAYOUT.reduce(1)
"""Layout of a vector with one entry per row of a tile."""
ROW = LAYOUT.reduce(0)
"""Layout of a vector with one entry per column of a tile."""


class Halves(NamedTuple):
    """An array as the sum of two bfloat16 arrays, or refs to them; `lo` None for a rounded one."""

    hi: Any
    lo: Any = None

    def at(self, *index: Any) -> "Halves":
        """The same slice of both halves."""
        return Halves(*(None if x is None else x.at[index] for x in self))

    @property
    def refs(self) -> list:
        """The halves that there are."""
        return [x for x in self if x is not None]

    @property
    def transposed(self) -> "Halves":
        """Both refs with rows and columns exchanged, without a copy."""
        return Halves(*(None if x is None else x.transpose((1, 0)) for x in self))


def split(x: jax.Array) -> Halves:
    """Splits registers inside a kernel."""
    # Without the barrier LLVM converts each number by itself once more, not two together.
    hi = jax.lax.optimization_barrier(x.astype(jnp.bfloat16))
    return Halves(hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16))


def operand(x: jax.Array, *, rounded: bool) -> Halves:
    """Registers as the left factor of a product."""
    return Halves(x.astype(jnp.bfloat16)) if rounded else split(x)


def put(tile: Halves, x: jax.Array, *, reused: bool = False) -> Halves:
    """Splits or rounds registers into a tile in shared memory, ready for `multiply`.

    With `reused` all warps first end their reads of what the tile held. It is needed if the tile
    has been read since the last barrier: `put`, `fetched`, `start_copies`, `store` of bfloat16, or
    a wait for what was sent.
    """
    if reused:
        plgpu.commit_smem()
    if tile.lo is None:
        tile.hi[...] = x.astype(jnp.bfloat16)
    else:
        tile.hi[...], tile.lo[...] = split(x)
    plgpu.commit_smem()
    return tile


def multiply(a: Halves, b: Halves) -> jax.Array:
    """The product `a b` of tiles in shared memory, without the product of the two low halves."""
    return sum_of_products((a, b))


def sum_of_products(*pairs: tuple[Halves, Halves]) -> jax.Array:
    """The sum of the products of the pairs like `multiply`; left factors may be in registers."""
    terms = [term for a, b in pairs for term in _terms(a, b)]
    if interpreted() and isinstance(terms[0][0], jax.Array):  # It multiplies shared memory only.
        wide = [(a.astype(jnp.float32), b[...].astype(jnp.float32)) for a, b in terms]
        return functools.reduce(jnp.add, (a @ b for a, b in wide))

    def accumulate(total):
        for a, b in terms:
            plgpu.wgmma(total, a, b)
        return total[...]

    shape = (pairs[0][0].hi.shape[0], pairs[0][1].hi.shape[1])
    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(total: jax.Array, a: Halves, b: Halves) -> jax.Array:
    """`total + multiply(a, b)`, accumulated where `total` is: no registers for another sum."""
    if interpreted():  # The interpreter has only sums that begin with zero.
        return total + multiply(a, b)

    def accumulate(sums):
        for left, right in _terms(a, b):
            plgpu.wgmma(sums, left, right)

    start: Any = plgpu.WGMMAAccumulatorRef.init(total)
    return pl.run_state(accumulate)(start)


def _terms(a: Halves, b: Halves) -> list[tuple[Any, Any]]:
    """The products of bfloat16 of which a product is the sum, the smallest first."""
    terms = (a.lo, b.hi), (a.hi, b.lo), (a.hi, b.hi)
    return [term for term in terms if None not in term]


def load(ref: Any, layout: Any = LAYOUT) -> jax.Array:
    """Reads a float32 tile or vector into registers."""
    if jax.__version_info__ < (0, 11):  # TODO: drop once jax>=0.11.
        return plgpu.load(ref, (), layout=layout, optimized=False)  # pyright: ignore
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore


def fetched(source: Any, *, stage: Any, arrived: Any) -> jax.Array:
    """Loads a tile of GPU memory to float32 registers through the shared memory `stage`.

    A direct load of a bfloat16 tile into wgmma's layout would use only half of each memory sector.
    """
    plgpu.commit_smem()  # All warps have read what the stage held.
    plgpu.copy_gmem_to_smem(source, stage, arrived)
    plgpu.barrier_wait(arrived)
    return load(stage).astype(jnp.float32)


def start_copies(
    copies: Sequence[tuple[Any, Any]], arrived: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Starts copies of GPU memory to shared memory, each on a barrier of its own.

    Args:
      copies: for each copy a ref to GPU memory, and one to shared memory.
      arrived: at least as many barriers.

    Returns:
      For each copy its shared memory and barrier, for `received`.
    """
    plgpu.commit_smem()  # All warps are done with what the shared memory held.
    started = [(tile, barrier) for (_, tile), barrier in zip(copies, arrived, strict=False)]
    for (source, _), (tile, barrier) in zip(copies, started, strict=True):
        plgpu.copy_gmem_to_smem(source, tile, barrier)
    return started


def received(copy: tuple[Any, Any]) -> jax.Array:
    """Waits for one of `start_copies`, and loads its tile to float32 registers."""
    tile, arrived = copy
    plgpu.barrier_wait(arrived)
    return load(tile).astype(jnp.float32)


def joined(tile: Halves) -> jax.Array:
    """Adds the halves of a split tile in float32 registers."""
    hi = load(tile.hi).astype(jnp.float32)
    return hi if tile.lo is None else hi + load(tile.lo).astype(jnp.float32)


def fetch_operand(source: Any, tile: Halves, *, stage: Any, arrived: Any) -> None:
    """Copies a tile of GPU memory to an operand of products; float32 is split in registers."""
    if tile.lo is not None:
        put(tile, fetched(source, stage=stage, arrived=arrived))
        return
    start_copies([(source, tile.hi)], [arrived])
    plgpu.barrier_wait(arrived)


def start_sending(tile: Halves, x: jax.Array, target: Halves, *, reused: bool = False) -> None:
    """Splits or rounds registers as `put`, and starts to copy the halves to GPU memory."""
    put(tile, x, reused=reused)
    for half, there in zip(tile.refs, target.refs, strict=True):
        plgpu.copy_smem_to_gmem(half, there)


def store(x: jax.Array, target: Any, *, stage: Any) -> None:
    """Writes registers to GPU memory: float32 directly, bfloat16 through the shared memory `stage`.

    Directly, bfloat16 tiles in wgmma's layout would fill only half of each memory sector.
    """
    if target.dtype == jnp.float32:
        target[...] = x
        return
    plgpu.commit_smem()  # All warps have read what the stage held.
    stage[...] = x.astype(stage.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, target)
    plgpu.wait_smem_to_gmem(0)


def send(tile: Halves, x: jax.Array, target: Halves, *, reused: bool = False) -> None:
    """Splits or rounds registers as `put`, and copies them to GPU memory; frees the tile again."""
    start_sending(tile, x, target, reused=reused)
    plgpu.wait_smem_to_gmem(0)


def rows_times(column: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies each row of `x` by the vector's entry for that row."""
    return jax.lax.broadcast_in_dim(column, x.shape, (0,)) * x


def columns_of(x: jax.Array, start: int, end: int) -> jax.Array:
    """Some columns of registers."""
    return jax.lax.slice(x, (0, start), (x.shape[0], end))


def columns_times(row: jax.Array, x: jax.Array) -> jax.Array:
    """Multiplies each column of `x` by the vector's entry for that column."""
    return jax.lax.broadcast_in_dim(row, x.shape, (1,)) * x


def smem(
    rows: int, columns: int, dtype: Any = jnp.bfloat16, *, slots: int = 0, swizzle: int = 128
) -> Any:
    """Shared memory for one or several tiles, tiled and swizzled as wgmma and TMA need it.

    Both operands of a product need the same swizzle, in bytes; it must divide the bytes of a row.
    """
    transforms = (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    shape = (slots, rows, columns) if slots else (rows, columns)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def smem_halves(rows: int, columns: int, *, of: Any = jnp.float32, **options: Any) -> Halves:
    """Shared memory for the operands of products, by the dtype `of` the kernel's arguments."""
    low = None if of == jnp.bfloat16 else smem(rows, columns, **options)
    return Halves(smem(rows, columns, **options), low)


def gpu_halves(shape: Sequence[int], *, of: Any) -> Halves:
    """Like `smem_halves`, an array in GPU memory: the type of a kernel's result."""
    half = jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16)
    return Halves(half, None if of == jnp.bfloat16 else half)


def two_halves(refs: Sequence[Any]) -> tuple[Halves, Halves]:
    """The two arrays whose `Halves.refs`, one after the other, are these."""
    return Halves(*refs[: len(refs) // 2]), Halves(*refs[len(refs) // 2 :])
