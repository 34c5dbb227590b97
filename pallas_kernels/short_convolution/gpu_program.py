"""GPU: which rows and columns a program of the convolution works on, and its loads and stores.

The projection is seen as rows of at most 256 columns: `[batch, length, rows, columns]`. A program
goes over the tokens of one tile for as many rows as a warpgroup holds, and keeps the inputs of the
last tokens in registers, so that it reads each input once. Nothing is shared between threads but
the sums of squares of a row, which a warp computes by itself: there are no barriers.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import dispatch
from pallas_kernels.mosaic_gpu import NO_BARRIERS, WARPGROUP, index32
from pallas_kernels.short_convolution.arguments import Part, channels_of, columns_of

WARP = 32
VECTORS = (4, 8, 2)
"""Columns of a thread, by preference. A load of four bfloat16 has 8 bytes; a warp then reads whole
rows of 128 columns. With eight the backward pass would take most registers."""
LARGEST_LOAD = 4
"""Numbers of a load, at most: 16 bytes of float32."""
TILES = {"forward": 32, "backward": 64}
"""Tokens of a program. It reads the `width - 1` tokens before its own as well, and in the backward
pass as many after them."""
INTERPRETED_TILE = 8
"""The same in the interpreter, where small inputs shall have several tiles."""
IN_FLIGHT = {"forward": 16, "backward": 8}
"""Numbers of an array that a thread loads together, while it computes with those before them. With
these, a processor's registers suffice for four programs of the backward pass."""


class Block(NamedTuple):
    """The rows of one part."""

    part: Part
    channels: slice | None
    """Those of the part among all channels of the taps."""
    first: int
    """First row of the part."""
    rows: int
    """Rows of the part."""
    column: int
    """First column of the part in each of its rows."""
    width: int
    """Columns of each row."""
    vector: int
    """Columns of a thread in each row."""

    @property
    def rows_here(self) -> int:
        """Rows of a program."""
        return WARPGROUP * self.vector // self.width

    @property
    def programs(self) -> int:
        """Programs for each tile of tokens."""
        return self.rows // self.rows_here

    @property
    def layout(self) -> Any:
        """Neighbouring threads hold neighbouring columns of a row; each warp has its own rows.

        A thread with more columns than a load may have holds several pieces of a row.
        """
        shape = (self.rows_here, self.width)
        of_warp = (self.rows_here // 4, self.width)
        piece = min(self.vector, LARGEST_LOAD)
        of_lanes = (self.width // self.vector * piece,)
        tiled = mgpu.TiledLayout(
            plgpu.Tiling((shape, of_warp, of_lanes, (piece,))),
            warp_dims=(-6,),
            lane_dims=(-4, -2),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        return plgpu.Layout.TILED(
            tiled.tiling,
            warp_dims=tiled.warp_dims,
            lane_dims=tiled.lane_dims,
            vector_dim=tiled.vector_dim,
        )


class Plan(NamedTuple):
    """How the programs divide a projection."""

    rows: int
    """Rows of a token."""
    blocks: tuple[Block, ...]


def plan(groups: int, parts: Sequence[Part]) -> Plan | str:
    """The plan for `groups` groups with these parts, or why there is none."""
    if groups > 1:
        for part in parts:
            if part.head not in (None, part.width):
                return f"heads of {part.head} in {groups} groups of {part.width} columns"
        return _plan(groups, parts, None)
    heads = {part.head for part in parts if part.head is not None}
    refusal = ""
    # A norm needs whole heads in a row; without one any width that fits will do.
    for unit in heads or (64, 128, 256, 32):
        found = _plan(1, parts, unit) if len(heads) < 2 else f"heads of {sorted(heads)} columns"
        if isinstance(found, Plan):
            return found
        refusal = refusal or found
    return refusal


def _plan(groups: int, parts: Sequence[Part], unit: int | None) -> Plan | str:
    """The plan with rows of a single group that are `unit` columns wide."""
    blocks = []
    for part, here, channels in zip(
        parts, columns_of(parts), channels_of(parts, groups), strict=True
    ):
        rows, width = (groups, part.width) if unit is None else (part.width // unit, unit)
        if unit is not None and part.width % unit:
            return f"{part.width} columns, which are no multiple of {unit}"
        # The widest loads first.
        vector = next((n for n in VECTORS if _fits(rows, width, n)), None)
        if vector is None:
            return f"{rows} rows of {width} columns"
        place = (0, rows, here.start) if unit is None else (here.start // unit, rows, 0)
        which = None if channels is None else slice(*channels)
        blocks.append(Block(part, which, *place, width, vector))
    total = sum(part.width for part in parts)
    return Plan(groups if unit is None else total // unit, tuple(blocks))


def _fits(rows: int, width: int, vector: int) -> bool:
    """Whether whole warpgroups cover the rows, with each row in one warp."""
    # A row must not lie over two warps, whose threads share no registers.
    if width % vector or WARP % (width // vector):
        return False
    return rows % (WARPGROUP * vector // width) == 0


def tile_of(direction: str) -> int:
    """Tokens of a program."""
    return INTERPRETED_TILE if dispatch.interpreted() else TILES[direction]


def load(ref: Any, block: Block) -> jax.Array:
    """Reads rows into registers, in the block's layout."""
    if dispatch.interpreted():
        return ref[...]
    if jax.__version_info__ < (0, 11):  # TODO: drop once jax>=0.11.
        return plgpu.load(ref, (), layout=block.layout, optimized=False)  # pyright: ignore
    return plgpu.load(ref, layout=block.layout, optimized=False)  # pyright: ignore


def laid_out(x: jax.Array, block: Block) -> jax.Array:
    return x if dispatch.interpreted() else plgpu.layout_cast(x, block.layout)


def over_columns(x: jax.Array, block: Block) -> jax.Array:
    """One number per row, in every column of the row."""
    shape = (block.rows_here, block.width)
    return laid_out(jax.lax.broadcast_in_dim(x, shape, (0,)), block)


def for_each_block(blocks: Sequence[Block], body: Any) -> None:
    """Calls `body(number, block, row)` in the program's own block, with its first row."""
    program, first = jax.lax.axis_index("block"), 0
    for number, block in enumerate(blocks):
        start, stop = first, first + block.programs
        first = stop

        # One grid serves all blocks: a second launch would cost more than idle branches.
        @pl.when((program >= start) & (program < stop))
        def _(number: int = number, block: Block = block, start: int = start):
            body(number, block, (program - start) * block.rows_here)


def grid_of(blocks: Sequence[Block], *, tiles: int, batch: int) -> dict[str, int]:
    """The programs of all blocks of rows, for each tile of tokens of each sequence."""
    return {"block": sum(block.programs for block in blocks), "tile": tiles, "batch": batch}


COMPILER = {**NO_BARRIERS, "approx_math": True}
"""No program reads what it or another one writes; exponentials as the hardware computes them, to
about 2^-22."""


def rows_of(x: jax.Array, block: Block) -> jax.Array:
    """The block's channels of `[..., channels]` as rows."""
    return x[..., block.channels].reshape(*x.shape[:-1], block.rows, block.width)


def inputs_before_tile(x: Any, before: Any, first: Any, block: Block) -> list[jax.Array]:
    """The inputs before a tile's first token, oldest first, in float32.

    Args:
      x: the rows of all tokens.
      before: the rows kept from before the first token.
      first: the tile's first token.
      block: of the rows.
    """
    reach = before.shape[0]

    def one(i: int) -> jax.Array:
        kept = load(before.at[i], block).astype(jnp.float32)
        # The first tile reads any token in the second load, which it then leaves out.
        read = load(x.at[jnp.maximum(first - reach + i, 0)], block).astype(jnp.float32)
        return jnp.where(first == 0, kept, read)

    return [one(i) for i in range(reach)]


def visible(inputs: Sequence[jax.Array], seen: Any | None) -> list[jax.Array]:
    """The inputs of a token, its own last, with zeros for those of other documents."""
    last = len(inputs) - 1
    if seen is None:
        return list(inputs)
    return [x if i == last else jnp.where(seen >= last - i, x, 0.0) for i, x in enumerate(inputs)]


def weighted_sum(taps: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> jax.Array:
    """The convolution's output for one token."""
    return functools.reduce(operator.add, (a * b for a, b in zip(taps, inputs, strict=True)))


def activated(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """SiLU, and the sigmoid. The square of `rsqrt` is a division in two instructions."""
    root = jax.lax.rsqrt(1.0 + jnp.exp(-x))
    sigmoid = root * root
    return x * sigmoid, sigmoid


def pipelined(count: int, fetch: Any, use: Any, carry: Any) -> Any:
    """`carry = use(i, fetch(i), carry)` for each i, where `fetch(i + 1)` comes before `use(i)`.

    Loads and stores stay in the program's order, so that loads wait for nothing that is computed.
    `fetch(count)` is called too, and not used.
    """

    def step(i: Any, state: Any) -> Any:
        i, (loaded, carry) = index32(i), state
        following = fetch(i + 1)
        return following, use(i, loaded, carry)

    return jax.lax.fori_loop(0, count, step, (fetch(jnp.int32(0)), carry))[1]
