"""TPU: how arrays are split into blocks, with several heads side by side along the lanes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta.arguments import CHUNK, Inputs

LANES = 128
MOST_HEADS = 4
"""Heads per block. More heads hide more latency but need more compile time and VMEM."""


class Blocks(NamedTuple):
    """Sizes and block specs of the arrays over the grid (batch, blocks of heads, chunks)."""

    batch: int
    length: int
    heads: int
    key: int
    value: int
    block: int
    """Heads per block."""
    reverse: bool
    """Whether the chunks are walked from the last to the first."""

    @classmethod
    def of(cls, inputs: Inputs, *, reverse: bool = False) -> "Blocks":
        batch, length, heads, key = inputs.key.shape
        assert length % CHUNK == 0, length
        value = inputs.value.shape[-1]
        # A block must fill whole rows of lanes, or hold all heads.
        fitting = [
            block
            for block in range(1, MOST_HEADS + 1)
            if heads % block == block * key % LANES == block * value % LANES == 0
        ]
        return cls(batch, length, heads, key, value, max(fitting, default=heads), reverse)

    @property
    def chunks(self) -> int:
        return self.length // CHUNK

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.block, self.chunks

    def lanes(self, width: int, head: int) -> slice:
        """The lanes of one head in a block of several heads."""
        return slice(head * width, (head + 1) * width)

    def _chunk(self, step):
        return self.chunks - 1 - step if self.reverse else step

    def tokens(self, width: int) -> pl.BlockSpec:
        """The spec of one chunk of `[batch, length, heads * width]`."""
        return pl.BlockSpec(
            (1, CHUNK, self.block * width), lambda b, h, step: (b, self._chunk(step), h)
        )

    def vectors(self) -> pl.BlockSpec:
        """The spec of one chunk of `[batch, blocks, chunks, block, chunk]`."""
        return pl.BlockSpec(
            (1, 1, 1, self.block, CHUNK), lambda b, h, step: (b, h, self._chunk(step), 0, 0)
        )

    def tiles(self, rows: int, columns: int) -> pl.BlockSpec:
        """The spec of one chunk of `[batch, chunks, heads, rows, columns]`."""
        return pl.BlockSpec(
            (1, 1, self.block, rows, columns), lambda b, h, step: (b, self._chunk(step), h, 0, 0)
        )

    def memory(self) -> pl.BlockSpec:
        """The spec of the heads' memories: the same block for every chunk."""
        return pl.BlockSpec((1, self.block, self.key, self.value), lambda b, h, step: (b, h, 0, 0))

    def input_specs(self) -> list[pl.BlockSpec]:
        tokens = [self.tokens(width) for width in (self.key, self.key, self.value)]
        return [*tokens, self.vectors(), self.vectors(), self.memory()]

    def arrange(self, inputs: Inputs) -> list[jax.Array]:
        """Reshapes arrays to the shapes that the specs expect."""
        tokens = [x.reshape(*x.shape[:2], -1) for x in inputs[:3]]
        vectors = [
            x.reshape(self.batch, self.chunks, CHUNK, -1, self.block).transpose(0, 3, 1, 4, 2)
            for x in (inputs.log_decay, inputs.beta)
        ]
        return [*tokens, *vectors, inputs.state]

    def restore(self, inputs: Inputs, arrays: Sequence[jax.Array]) -> Inputs:
        """The inverse of `arrange`."""
        *tokens, log_decay, beta, state = arrays
        vectors = (x.transpose(0, 2, 4, 1, 3) for x in (log_decay, beta))
        arrays = [*tokens, *vectors, state]
        return Inputs(*(x.reshape(y.shape) for x, y in zip(arrays, inputs, strict=True)))
