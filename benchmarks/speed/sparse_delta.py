"""Times a chunk of Sparse Delta Memory beside its parts, for tables of several sizes.

    python -m benchmarks.speed.sparse_delta --out benchmarks/results/sparse_delta_cpu.json

Parts are the chunk's own arithmetic: the decays and products between tokens, the rows gathered,
read, written and scattered, the triangular solve. Each is timed alone, in turn with the chunk.
Sorting the chunk's slots is timed, too, but not added to the parts. `of_parts` is the chunk's time
over their sum. Processor time adds up all threads, and says more on a machine that runs other
programs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax.core.recurrence.triangular import unit_lower_inverse
from fwpkm_jax.core.slots.delta.chunks import relate, sparse_delta
from fwpkm_jax.core.slots.delta.definition import DeltaTokens
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.values.rows import add_by_blocks, read_rows


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times one chunk of one memory, forward."""

    slots: tuple[int, ...] = (16_384, 65_536, 1_048_576)
    """Rows of the tables."""
    value: int = 256
    """Numbers of a row."""
    tokens: int = 64
    """Tokens of the chunk."""
    places: int = 64
    """Slots that a token writes, and as many that it reads."""
    chunks: int = 4
    """Chunks of one call, which is divided by them."""
    repeats: int = 9
    """Rounds; the least time of each counts."""
    out: Path | None = None
    """File of the results."""


def sample(options: Options, slots: int) -> tuple[jax.Array, DeltaTokens]:
    """A table and the tokens of all chunks; a token's slots differ, those of a chunk may not."""
    rng = np.random.default_rng(0)
    length = options.tokens * options.chunks

    def ids() -> jax.Array:
        drawn = [rng.choice(slots, options.places, replace=False) for _ in range(length)]
        return jnp.asarray(np.stack(drawn)[None], jnp.int32)

    weights = jnp.full((1, length, options.places), 1 / options.places, jnp.float32)
    values = jnp.asarray(rng.normal(size=(1, length, options.value)), jnp.float32)
    gates = jnp.full((1, length), 0.5, jnp.float32)
    tokens = DeltaTokens(ids(), weights, ids(), weights, values, -0.01 * gates, gates)
    return jnp.zeros((1, slots, options.value), jnp.float32), tokens


def parts(options: Options, table: jax.Array, tokens: DeltaTokens) -> dict[str, Callable[[], Any]]:
    """The parts of the first chunk, each a call that gives what the next ones take."""
    first = jax.tree.map(lambda x: x[:, : options.tokens], tokens)
    ids = jnp.concatenate([first.write_ids, first.read_ids], axis=-1)[0]
    slots, writes = table.shape[1], options.places
    sort = jax.jit(functools.partial(group_slots, num_slots=slots))
    groups = sort(ids)
    distinct = min(ids.size, slots)
    between = jax.jit(functools.partial(relate, distinct=distinct, decay="slot"))
    weights = first.write_weights, first.read_weights, first.log_decay
    of_rows = between(groups.rank, *weights)
    found, left, rank = of_rows.found[0], of_rows.left[0], groups.rank
    rows = jnp.zeros((distinct, options.value), table.dtype)

    @jax.jit
    def gather(table: jax.Array) -> jax.Array:
        return table.at[groups.slots[:distinct]].get(mode="clip")

    @jax.jit
    def read(rows: jax.Array) -> Any:
        written = read_rows(rows, rank[:, :writes], found[:, :writes])
        return written, read_rows(rows, rank[:, writes:], found[:, writes:])

    @jax.jit
    def solve(values: jax.Array) -> jax.Array:
        inverse = unit_lower_inverse(of_rows.corrected[0] * first.strength)
        return of_rows.seen[0] @ (inverse @ values)

    @jax.jit
    def add(rows: jax.Array, values: jax.Array) -> jax.Array:
        return add_by_blocks(of_rows.kept[:, None] * rows, rank[:, :writes], left, values)

    @functools.partial(jax.jit, donate_argnums=0)
    def scatter(table: jax.Array, rows: jax.Array) -> jax.Array:
        return table.at[groups.slots[:distinct]].set(
            rows, mode="drop", unique_indices=True, indices_are_sorted=True
        )

    flat = table[0]  # Once: a slice of its own would copy the table.
    held = [flat + 0]

    def scatter_into_held() -> jax.Array:
        held[0] = scatter(held[0], rows)
        return held[0]

    values = first.values[0]
    return {
        "sort": lambda: sort(ids),
        "gather": lambda: gather(flat),
        "products": lambda: between(rank, *weights),
        "read": lambda: read(rows),
        "solve": lambda: solve(values),
        "write": lambda: add(rows, values),
        "scatter": scatter_into_held,
    }


def measure(options: Options, slots: int) -> dict[str, Any]:
    """Milliseconds of a chunk and of its parts, by the clock and of the processor."""
    table, tokens = sample(options, slots)
    calls = parts(options, table, tokens)
    run = jax.jit(functools.partial(sparse_delta, chunk_size=options.tokens), donate_argnums=0)
    held = [table + 0]

    def chunks() -> jax.Array:
        held[0], output = run(held[0], tokens)
        return output

    calls["chunk"] = chunks
    least: dict[str, list[float]] = {}
    for _ in range(options.repeats + 1):  # The first round compiles.
        for name, call in calls.items():
            clock, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(call())
            spent = [time.perf_counter() - clock, time.process_time() - processor]
            spent = [1e3 * x / (options.chunks if name == "chunk" else 1) for x in spent]
            least[name] = [min(pair) for pair in zip(least.get(name, spent), spent, strict=True)]
    clocks, processors = (
        {name: round(times[i], 3) for name, times in least.items()} for i in range(2)
    )

    def of_parts(times: dict[str, float]) -> float:
        counted = sum(time for name, time in times.items() if name not in ("sort", "chunk"))
        return round(times["chunk"] / counted, 3)

    return {
        "slots": slots,
        "milliseconds": clocks,
        "processor_milliseconds": processors,
        "of_parts": of_parts(clocks),
        "of_parts_processor": of_parts(processors),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table sizes."""
    options = parse(Options, argv, description=__doc__)
    rows = []
    for slots in options.slots:
        rows.append(measure(options, slots))
        print(rows[-1], flush=True)
    result = {"settings": settings(options), "machine": environment(), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
