"""SparseCore kernels: each subcore processes blocks of tokens and gathers a block's rows at once.

While a subcore sums the rows of a block, it receives the rows of the next block and stores the sums
of the previous one.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import sparse_core
from pallas_kernels.sparse_core import Copy

BLOCK = 64 * 1024
"""Largest size of a block's rows, in bytes; a subcore's memory holds two blocks."""
ROUND = 32
"""Largest number of blocks whose slot ids and weights are in a subcore's memory at once."""
PLACES = 8
"""Places summed at once."""


def read(
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The output of `slot_read`, and its errors if targets are given."""
    tokens, places = slot_ids.shape
    width = values.shape[1]
    plan = _Plan.of(tokens, places, width)
    lanes, with_errors = plan.lanes, target is not None
    factors = weights
    if target is not None and write_weight is not None:
        factors = jnp.concatenate([weights, write_weight[:, None]], axis=1)
    per_token = factors.shape[1]
    per_block = plan.per_block(per_token)

    def body(subcore, slot_ids, factors, values, *refs):
        targets_in, refs = refs[:with_errors], refs[with_errors:]
        results, refs = refs[: 1 + with_errors], refs[1 + with_errors :]
        ids, held, rows, sums, sems, out_sems, *target_refs = refs

        def loads(block, i, slot):
            yield plan.gather_rows(values, ids, i, rows.at[slot], sems.at[slot])
            if with_errors:
                targets, target_sems = target_refs
                source = targets_in[0].at[plan.tokens_of(block)]
                yield sparse_core.load(source, targets.at[slot], target_sems.at[slot])

        def stores(block, i, slot):
            for k, result in enumerate(results):
                source = sums.at[2 * k + slot]
                yield sparse_core.store(source, result.at[plan.tokens_of(block)], out_sems.at[slot])

        def use(i, slot):
            @pl.loop(0, plan.block)
            def _(j):
                def factor(p):
                    index = i * per_block + j * per_token + p
                    return sparse_core.take(held, jnp.full(lanes, index, jnp.int32))

                for begin in range(0, places, PLACES):
                    some = range(begin, min(begin + PLACES, places))
                    factor_of = {p: factor(p) for p in some}

                    def add(columns, begin=begin, factor_of=factor_of):
                        total = sums[slot, j, columns] if begin else jnp.zeros(lanes, jnp.float32)
                        for p, weight in factor_of.items():
                            total += weight * rows[slot, j * places + p, columns]
                        sums[slot, j, columns] = total

                    sparse_core.for_columns(width, lanes, add)
                if with_errors:
                    weight, targets = factor(places), target_refs[0]

                    def compare(columns):
                        gap = sums[slot, j, columns] - targets[slot, j, columns]
                        sums[2 + slot, j, columns] = weight * gap

                    sparse_core.for_columns(width, lanes, compare)

        held_arrays = [(slot_ids, ids), (factors, held)]
        plan.stream(subcore, held_arrays, sems.at[0], loads, stores, use)

    results = sparse_core.launch(
        body,
        *(plan.by_block(slot_ids), plan.by_block(factors)),
        values,
        *([plan.padded(target)] if target is not None else []),
        out_type=[jax.ShapeDtypeStruct((plan.all_tokens, width), jnp.float32)] * (1 + with_errors),
        scratch=[
            pltpu.VMEM((plan.round * plan.per_block(places),), jnp.int32),
            pltpu.VMEM((plan.round * per_block,), jnp.float32),
            pltpu.VMEM((2, plan.per_block(places), width), jnp.float32),
            pltpu.VMEM((2 * (1 + with_errors), plan.block, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            *[pltpu.VMEM((2, plan.block, width), jnp.float32)] * with_errors,
            *[pltpu.SemaphoreType.DMA((2,))] * with_errors,
        ],
        name="slot_read",
    )
    output, *errors = (x[:tokens] for x in results)
    return output, errors[0] if errors else None


def dot(values: jax.Array, slot_ids: jax.Array, vectors: jax.Array) -> jax.Array:
    """The result of `slot_dot`.

    The products of each place are first summed to one vector of `lanes` numbers. Then the vectors
    of `lanes` places are transposed together, so that the sums of all of them form one vector.
    """
    tokens, places = slot_ids.shape
    width = values.shape[1]
    plan = _Plan.of(tokens, places, width)
    lanes = plan.lanes
    per_token = pl.cdiv(places, lanes) * lanes
    per_block = plan.block * per_token

    def body(
        subcore, slot_ids, values, vectors, output, ids, rows, held, square, dots, *semaphores
    ):
        sems, out_sems, vector_sems = semaphores

        def loads(block, i, slot):
            yield plan.gather_rows(values, ids, i, rows.at[slot], sems.at[slot])
            source = vectors.at[plan.tokens_of(block)]
            yield sparse_core.load(source, held.at[slot], vector_sems.at[slot])

        def stores(block, i, slot):
            source = dots.at[pl.ds(pl.multiple_of(slot * per_block, lanes), per_block)]
            target = output.at[pl.ds(pl.multiple_of(block * per_block, lanes), per_block)]
            yield sparse_core.store(source, target, out_sems.at[slot])

        def use(i, slot):
            @pl.loop(0, plan.block)
            def _(j):
                for begin in range(0, places, lanes):
                    some = range(begin, min(begin + lanes, places))

                    def add(columns, totals, some=some):
                        vector = held[slot, j, columns]
                        return [
                            total + rows[slot, j * places + p, columns] * vector
                            for p, total in zip(some, totals, strict=True)
                        ]

                    zeros = [jnp.zeros(lanes, jnp.float32) for _ in some]
                    totals = sparse_core.sum_columns(width, lanes, add, zeros)
                    for p, total in enumerate(totals):
                        square[pl.ds(p * lanes, lanes)] = total
                    diagonal = jax.lax.iota(jnp.int32, lanes) * lanes
                    columns = [sparse_core.take(square, diagonal + lane) for lane in range(lanes)]
                    offset = slot * per_block + j * per_token + begin
                    dots[pl.ds(pl.multiple_of(offset, lanes), lanes)] = sum(columns[1:], columns[0])

        plan.stream(subcore, [(slot_ids, ids)], sems.at[0], loads, stores, use)

    (output,) = sparse_core.launch(
        body,
        *(plan.by_block(slot_ids), values, plan.padded(vectors)),
        out_type=[jax.ShapeDtypeStruct((plan.blocks * per_block,), jnp.float32)],
        scratch=[
            pltpu.VMEM((plan.round * plan.per_block(places),), jnp.int32),
            pltpu.VMEM((2, plan.per_block(places), width), jnp.float32),
            pltpu.VMEM((2, plan.block, width), jnp.float32),
            pltpu.VMEM((lanes * lanes,), jnp.float32),
            pltpu.VMEM((2 * per_block,), jnp.float32),
            *[pltpu.SemaphoreType.DMA((2,))] * 3,
        ],
        name="slot_dot",
    )
    return output.reshape(plan.all_tokens, per_token)[:tokens, :places]


@dataclass(frozen=True)
class _Plan:
    """Which tokens each subcore processes, and in which blocks.

    Attributes:
      tokens: number of tokens of the call.
      places: places per token.
      subcores: number of subcores that share the tokens.
      lanes: numbers in a subcore's vector.
      block: number of tokens whose rows are gathered with one command.
    """

    tokens: int
    places: int
    subcores: int
    lanes: int
    block: int

    @staticmethod
    def of(tokens: int, places: int, width: int) -> "_Plan":
        most = max(1, min(BLOCK // (places * width * 4), 128 // places))
        block = next(size for size in (8, 4, 2, 1) if size <= most)
        cores = sparse_core.subcores()
        return _Plan(tokens, places, cores.number, cores.lanes, block)

    def per_block(self, per_token: int) -> int:
        """How many numbers a block has, rounded up so that the next block is aligned."""
        return pl.cdiv(self.block * per_token, 8) * 8

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.tokens, self.block)

    @property
    def all_tokens(self) -> int:
        """Number of tokens, padded to fill the last block."""
        return self.blocks * self.block

    @property
    def rounds(self) -> int:
        """How often a subcore fetches slot ids and weights."""
        return pl.cdiv(pl.cdiv(self.blocks, self.subcores), ROUND)

    @property
    def round(self) -> int:
        """Blocks of a round."""
        return pl.cdiv(self.blocks, self.subcores * self.rounds)

    def padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, self.all_tokens - self.tokens), (0, 0)])

    def by_block(self, x: jax.Array) -> jax.Array:
        """Arranges an array `[tokens, n]` by block for all rounds of all subcores; pads with 0."""
        blocks = self.padded(x).reshape(self.blocks, -1)
        more = self.subcores * self.rounds * self.round - self.blocks
        more_of_each = self.per_block(x.shape[1]) - blocks.shape[1]
        return jnp.pad(blocks, [(0, more), (0, more_of_each)]).reshape(-1)

    def tokens_of(self, block: Any) -> Any:
        return pl.ds(pl.multiple_of(block * self.block, self.block), self.block)

    def gather_rows(self, values: Any, ids: Any, i: Any, target: Any, semaphore: Any) -> Copy:
        """The copy that gathers the rows of the i-th block of a round."""
        rows = self.per_block(self.places)
        indices = ids.at[pl.ds(pl.multiple_of(i * rows, 8), rows)]
        return sparse_core.gather(values, indices, target, semaphore)

    def stream(
        self,
        subcore: Any,
        held: Sequence[tuple[Any, Any]],
        semaphore: Any,
        loads: Callable[..., Any],
        stores: Callable[..., Any],
        use: Callable[..., None],
    ) -> None:
        """Calls `use(i, slot)` for each block of a subcore; its rows are copied ahead of time.

        Args:
          subcore: the subcore's number.
          held: pairs of source and target that are copied at the start of a round.
          semaphore: semaphore of these copies.
          loads: `loads(block, i, slot)` gives the copies into buffer `slot` for block number `i` of
            the round.
          stores: `stores(block, i, slot)` gives the copies out of it.
          use: the computation between loads and stores.
        """

        @pl.loop(0, self.rounds)
        def _(round_):
            first = (subcore * self.rounds + round_) * self.round
            count = jnp.clip(self.blocks - first, 0, self.round)
            for source, target in held:
                size = target.shape[0]
                part = source.at[pl.ds(pl.multiple_of(first * (size // self.round), 8), size)]
                copy = sparse_core.load(part, target, semaphore)
                copy.start()
                copy.wait()

            def each(copies, action, i):
                for copy in copies(first + i, i, i % 2):
                    getattr(copy, action)()

            start_loads = functools.partial(each, loads, "start")
            wait_stores = functools.partial(each, stores, "wait")
            pl.when(count > 0)(lambda: start_loads(0))

            @pl.loop(0, count)
            def _(i):
                pl.when(i + 1 < count)(lambda: start_loads(i + 1))
                each(loads, "wait", i)
                pl.when(i >= 2)(lambda: wait_stores(i - 2))
                use(i, i % 2)
                each(stores, "start", i)

            pl.loop(jnp.maximum(count - 2, 0), count)(wait_stores)
