"""TPU: how arrays are split into blocks, with several heads side by side along the lanes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta.arguments import CHUNK, Inputs
from pallas_kernels.gated_delta.tiles import LANES, SideBySide

MOST_HEADS = 8
"""Heads per block. More heads hide more latency but need more compile time and VMEM."""
MOST_LANES = 1024
"""Lanes that a block's keys or values have at most, so that its arrays fit in VMEM."""


class Blocks(NamedTuple):
    """Sizes and block specs of the arrays over the grid (batch, blocks of heads, chunks)."""

    batch: int
    length: int
    heads: int
    key: int
    value: int
    block: int
    """Heads per block."""
    side: SideBySide
    """The heads of a group, which share tiles; a block has one or more groups."""
    reverse: bool
    """Whether the chunks are walked from the last to the first."""

    @classmethod
    def of(cls, inputs: Inputs, *, reverse: bool = False) -> "Blocks":
        batch, length, heads, key = inputs.key.shape
        assert length % CHUNK == 0, length
        value = inputs.value.shape[-1]
        group = LANES // CHUNK if heads % (LANES // CHUNK) == 0 else 1
        # A block must fill whole rows of lanes, or hold all heads.
        fitting = [
            block
            for block in range(group, MOST_HEADS + 1, group)
            if heads % block == block * key % LANES == block * value % LANES == 0
            and block * max(key, value) <= MOST_LANES
        ]
        block = max(fitting, default=heads)
        rounded = all(x.dtype == jnp.bfloat16 for x in inputs[:3])
        side = SideBySide(group, rounded)
        return cls(batch, length, heads, key, value, block, side, reverse)

    @property
    def groups(self) -> int:
        """Groups per block."""
        return self.block // self.side.heads

    @property
    def chunks(self) -> int:
        return self.length // CHUNK

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.block, self.chunks

    def of_chunk(self, query, key, value, log_decay, beta) -> list[jax.Array]:
        """The groups' parts of the blocks of one chunk: tokens `[groups, chunk, group * width]`,
        vectors `[groups, 1, group * chunk]`."""
        tokens = [self.split(ref[0]) for ref in (query, key, value)]
        return [*tokens, *(ref[0, 0, 0][:, None] for ref in (log_decay, beta))]

    def split(self, tokens: jax.Array) -> jax.Array:
        """`[chunk, block * width]` as `[groups, chunk, group * width]`."""
        return jnp.stack(jnp.split(tokens, self.groups, axis=1))

    def join(self, ref, tokens: jax.Array) -> None:
        """Writes the inverse of `split` to a block `[1, chunk, block * width]`, in its dtype."""
        width = tokens.shape[2]
        for group in range(self.groups):
            ref[0, :, group * width : (group + 1) * width] = tokens[group].astype(ref.dtype)

    def _chunk(self, step):
        return self.chunks - 1 - step if self.reverse else step

    def tokens(self, width: int) -> pl.BlockSpec:
        """The spec of one chunk of `[batch, length, heads * width]`."""
        return pl.BlockSpec(
            (1, CHUNK, self.block * width), lambda b, h, step: (b, self._chunk(step), h)
        )

    def vectors(self) -> pl.BlockSpec:
        """The spec of one chunk of `[batch, blocks, chunks, groups, group * chunk]`."""
        return pl.BlockSpec(
            (1, 1, 1, self.groups, self.side.heads * CHUNK),
            lambda b, h, step: (b, h, self._chunk(step), 0, 0),
        )

    def tiles(self, rows: int, columns: int) -> pl.BlockSpec:
        """The spec of one chunk of `tiles_shape`."""
        shape = self.tiles_shape(rows, columns)
        return pl.BlockSpec(
            (1, 1, self.groups, *shape[3:]), lambda b, h, step: (b, self._chunk(step), h, 0, 0)
        )

    def tiles_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """`[batch, chunks, all groups, rows, group * columns]`."""
        group = self.side.heads
        return self.batch, self.chunks, self.heads // group, rows, group * columns

    def memory(self) -> pl.BlockSpec:
        """The spec of the heads' memories: the same block for every chunk."""
        return pl.BlockSpec(
            (1, self.groups, self.key, self.side.heads * self.value),
            lambda b, h, step: (b, h, 0, 0),
        )

    def input_specs(self) -> list[pl.BlockSpec]:
        tokens = [self.tokens(width) for width in (self.key, self.key, self.value)]
        return [*tokens, self.vectors(), self.vectors(), self.memory()]

    def arrange(self, inputs: Inputs) -> list[jax.Array]:
        """Reshapes arrays to the shapes that the specs expect."""
        tokens = [x.reshape(*x.shape[:2], -1) for x in inputs[:3]]
        vectors = [
            x.reshape(self.batch, self.chunks, CHUNK, -1, self.groups, self.side.heads)
            .transpose(0, 3, 1, 4, 5, 2)
            .reshape(self.batch, -1, self.chunks, self.groups, self.side.heads * CHUNK)
            for x in (inputs.log_decay, inputs.beta)
        ]
        return [*tokens, *vectors, self.arrange_memory(inputs.state)]

    def restore(self, inputs: Inputs, arrays: Sequence[jax.Array]) -> Inputs:
        """The inverse of `arrange`."""
        *tokens, log_decay, beta, state = arrays
        vectors = (
            x.reshape(*x.shape[:4], self.side.heads, CHUNK).transpose(0, 2, 5, 1, 3, 4)
            for x in (log_decay, beta)
        )
        arrays = [*tokens, *vectors, self.restore_memory(state)]
        return Inputs(*(x.reshape(y.shape) for x, y in zip(arrays, inputs, strict=True)))

    def arrange_memory(self, state: jax.Array) -> jax.Array:
        """`[batch, heads, key, value]` with the heads of each group side by side."""
        state = state.reshape(self.batch, -1, self.side.heads, self.key, self.value)
        return state.swapaxes(2, 3).reshape(self.batch, -1, self.key, self.side.heads * self.value)

    def restore_memory(self, state: jax.Array) -> jax.Array:
        """The inverse of `arrange_memory`."""
        state = state.reshape(self.batch, -1, self.key, self.side.heads, self.value)
        return state.swapaxes(2, 3).reshape(self.batch, self.heads, self.key, self.value)
