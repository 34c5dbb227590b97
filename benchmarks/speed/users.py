"""Measures the time per token of decoding for many users: overlays of one base, private tables.

    python -m benchmarks.speed.users --out benchmarks/results/decode_users_cpu.json

Each user decodes with a memory layer of its own fast weights. One timed call decodes as many tokens
as a chunk has, one at a time, and so includes one write. It begins from the same state each time.
The cases take turns, so that a busy moment of the machine affects all alike.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment, peak_host_megabytes, settings, write_result
from benchmarks.options import parse
from fwpkm_jax.core.chunks import Memory, Shared, map_unshared
from fwpkm_jax.core.slots.options.overlay import OverlayTable, refuse_lost
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import FwPKM


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times decoding with a memory layer, one memory per user."""

    users: tuple[int, ...] = (1, 2, 8, 32)
    """Users who decode in one batch."""
    rows: tuple[int, ...] = (0, 1024, 4096, 16384)
    """Slots that each user of an overlay has written before."""
    subkeys: int = 128
    """Sub-keys per codebook; a table has their square as slots."""
    dim: int = 64
    """Width of the model, of keys and of values."""
    top_k: int = 8
    """Slots that a token reads."""
    chunk_size: int = 64
    """Tokens between two writes."""
    repeats: int = 5
    """Timed calls of each case."""
    out: Path | None = None
    """File for the JSON; None: print it."""


class Case:
    """One number of users with private tables, or with overlays of some rows."""

    def __init__(self, options: Options, users: int, rows: int | None):
        rule = FwPKM(
            num_subkeys=options.subkeys,
            key_dim=options.dim,
            value_dim=options.dim,
            top_k=options.top_k,
        )
        config = FastWeightConfig(rule=rule, chunk_size=options.chunk_size)
        layer = FastWeight(config, options.dim, rngs=nnx.Rngs(0))
        base = jax.tree.map(lambda x: x[None], rule.init(jax.random.key(0)))
        if rows is not None:
            # The call that warms up and the timed call write a chunk each.
            room = 2 * options.chunk_size * options.top_k
            base = base._replace(values=overlay_of(base.values[0], rows, room))
        self.users, self.rows, self.chunk_size = users, rows, options.chunk_size
        memory = map_unshared(lambda x: jnp.repeat(x, users, axis=0), base)
        pending = layer.init_pending(
            users, users, max_chunk_size=options.chunk_size, dtype=jnp.float32
        )
        self.x = jax.random.normal(jax.random.key(1), (options.chunk_size, users, 1, options.dim))
        graphdef, self.params = nnx.split(layer)

        def decode(params: Any, state: tuple[Memory, Any], x: jax.Array) -> tuple[Any, jax.Array]:
            def token(state: tuple[Memory, Any], x: jax.Array) -> tuple[Any, jax.Array]:
                y, memory, pending, _ = nnx.merge(graphdef, params).stream(x, *state)
                return (memory, pending), y

            return jax.lax.scan(token, state, x)

        lowered = jax.jit(decode, donate_argnums=1).lower(self.params, (memory, pending), self.x)
        self.call = lowered.compile()
        self.state = self.call(self.params, (memory, pending), self.x)[0]
        self.bytes = sum(x.nbytes for x in jax.tree.leaves(own_part(self.state[0]))) / users
        self.capacity = self.state[0].values.capacity if rows is not None else None

    def seconds(self) -> float:
        """Of one call; raises a ValueError if a user's rows found no room."""
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self.state))
        began = time.perf_counter()
        (memory, _), y = jax.block_until_ready(self.call(self.params, state, self.x))
        took = time.perf_counter() - began
        assert bool(jnp.isfinite(y).all())
        if isinstance(memory.values, OverlayTable):
            refuse_lost("memory", memory.values)
        return took


def overlay_of(base: jax.Array, rows: int, room: int) -> OverlayTable:
    """One overlay with this number of random slots in use, and room for more."""
    num_slots = base.shape[0]
    capacity = min(rows + room, num_slots)
    rng = np.random.default_rng(0)
    slots = np.full((1, capacity), num_slots, np.int32)
    slots[0, :rows] = np.sort(rng.permutation(num_slots)[:rows])
    own = np.zeros((1, capacity + 1, base.shape[1]), np.float32)
    own[0, :rows] = np.asarray(base)[slots[0, :rows]]
    places = np.arange(capacity, dtype=np.int32)[None]
    used = np.full((1,), rows, np.int32)
    parts = [jnp.asarray(x) for x in (slots, places, used, np.zeros_like(used))]
    return OverlayTable(*parts, base=Shared(base), rows=jnp.asarray(own))


def own_part(memory: Any) -> Any:
    """The memory without what its users share."""
    return [
        x
        for x in jax.tree.leaves(memory, is_leaf=lambda x: isinstance(x, Shared))
        if not isinstance(x, Shared)
    ]


def measure(options: Options) -> list[dict[str, Any]]:
    rows = []
    for users in options.users:
        cases = [Case(options, users, n) for n in (None, *options.rows)]
        times: list[list[float]] = [[] for _ in cases]
        for _ in range(options.repeats):
            for case, found in zip(cases, times, strict=True):
                found.append(case.seconds())
        for case, found in zip(cases, times, strict=True):
            per_token = 1e6 * np.array(found) / (case.chunk_size * users)
            rows.append(
                {
                    "users": users,
                    "table": "private" if case.rows is None else "overlay",
                    "rows_before": case.rows,
                    "capacity": case.capacity,
                    "microseconds_per_token": float(per_token.min()),
                    "microseconds_median": float(np.median(per_token)),
                    "kilobytes_per_user": case.bytes / 1e3,
                }
            )
    return rows


def crossovers(options: Options, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From how many rows on a private table takes less time, by users, and less memory."""
    faster = {}
    for users in options.users:
        own = [row for row in rows if row["users"] == users]
        private = own[0]["microseconds_median"]
        slower = [row["rows_before"] for row in own[1:] if row["microseconds_median"] > private]
        faster[str(users)] = min(slower, default=None)
    row = 4 * options.dim
    return {
        "rows_measured_where_private_is_faster": faster,
        "rows_where_private_is_smaller": options.subkeys**2 * row // (row + 8),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = measure(options)
    result = {
        "environment": environment(),
        "options": settings(options),
        "rows": rows,
        "crossovers": crossovers(options, rows),
        "peak_megabytes": peak_host_megabytes(),
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
