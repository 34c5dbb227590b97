"""Times operations on rows and counts the bytes that they have to move.

The calls run in a loop on the device, so the host and its launches are not timed. Each call has
other slots, so no call finds its rows in the cache because the previous call read them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import median_seconds
from fwpkm_jax.core.slots.values.grouping import SlotGroups, group_slots
from pallas_kernels.dispatch import Backend
from pallas_kernels.slot_add.api import slot_add
from pallas_kernels.slot_read.api import slot_dot, slot_read
from pallas_kernels.slot_read.specs import RowSpec, draw_slots

Stream = Literal["random", "zipf", "hot10", "hot50", "recorded"]
WORD = 4


@dataclass(frozen=True, kw_only=True)
class RowSize:
    """Sizes of a table and of the tokens that read it."""

    slots: int = 512**2
    value: int = 512
    tokens: int = 4096
    places: int = 8
    calls: int = 16
    """Calls in the timed loop, each with other slots."""


SIZES = {
    "tiny": (RowSize(slots=64, value=128, tokens=16, places=4, calls=2),),
    "paper": (
        RowSize(tokens=512, calls=64),
        RowSize(),
        RowSize(tokens=131072, calls=3),
        RowSize(value=128, places=32, tokens=1024, calls=64),
    ),
}


def slot_stream(size: RowSize, stream: Stream, recorded: Path | None) -> np.ndarray:
    """Slots of every call, `[calls, tokens, places]` int32.

    A recorded stream is the array `slot_ids` of an .npz file, `[..., places]`, in the order of its
    tokens. It is made to fit the size: a size with more places per token takes the places of
    several tokens, a size with more tokens than the recording repeats it, and slots beyond the
    table are taken modulo its size.

    Raises:
      ValueError: no file is named, or it holds no slots.
    """
    shape = (size.calls, size.tokens, size.places)
    rng = np.random.default_rng(0)
    if stream == "recorded":
        if recorded is None:
            raise ValueError("The stream 'recorded' needs a file; name it with --stream PATH.")
        slot_ids = recorded_slots(recorded)
        return (np.resize(slot_ids, shape) % size.slots).astype(np.int32)
    spec = RowSpec(
        name=stream,
        tokens=size.calls * size.tokens,
        places=size.places,
        slots=size.slots,
        drawn="zipf" if stream == "zipf" else "random",
    )
    slot_ids = draw_slots(spec, rng).reshape(shape)
    if stream in ("hot10", "hot50"):
        share = 0.1 if stream == "hot10" else 0.5
        slot_ids = np.where(rng.random(shape) < share, size.slots // 3, slot_ids)
    return slot_ids.astype(np.int32)


def recorded_slots(path: Path) -> np.ndarray:
    """All slots of a recording, one after another."""
    with np.load(path) as file:
        slot_ids = file["slot_ids"].reshape(-1)
    if not slot_ids.size:
        raise ValueError(f"{path}: slot_ids is empty; record it again.")
    return slot_ids


def fitted(path: Path, size: RowSize) -> dict[str, Any]:
    """How a recording was made to fit a size: its repetitions, and whether slots were folded."""
    slot_ids = recorded_slots(path)
    repeated = size.calls * size.tokens * size.places / slot_ids.size
    return {"recording_repeated": repeated, "recording_folded": bool(slot_ids.max() >= size.slots)}


def row_times(
    op: str, size: RowSize, slot_ids: np.ndarray, *, backend: Backend, repeats: int
) -> dict[str, Any]:
    """Seconds and bytes of one call of `op`, averaged over the stream."""
    tokens, places = slot_ids.shape[1:]
    rngs = jax.random.split(jax.random.key(0), 3)
    # All rows are equal: values do not affect the time, and random ones need several tables.
    table = jnp.full((size.slots, size.value), 0.5, jnp.float32)
    rows = jax.random.normal(rngs[0], (tokens, size.value), jnp.float32)
    weights = jax.random.uniform(rngs[1], (tokens, places), jnp.float32) - 0.5
    write_weight = jax.random.uniform(rngs[2], (tokens,), jnp.float32)
    ids = jnp.asarray(slot_ids)
    groups = None
    if op.startswith("write"):
        grouped = jax.vmap(lambda x: group_slots(x, num_slots=size.slots))
        groups = jax.jit(grouped)(ids)
    run = _loop(op, rows, weights, write_weight, backend)
    carried = [jax.block_until_ready(table)]
    loop = jax.jit(run, donate_argnums=0)

    def call() -> Any:
        carried[0], result = loop(carried[0], ids, groups)
        return carried[0], result

    seconds, spread = median_seconds(call, repeats=repeats)
    unique = float(np.mean([len(np.unique(x)) for x in slot_ids]))
    references = tokens * places
    row = size.value * WORD
    moved = {
        "read": unique * row + tokens * row + references * 2 * WORD,
        "read_error": unique * row + 3 * tokens * row + references * 2 * WORD,
        "dot": unique * row + tokens * row + references * 2 * WORD,
        "write": 2 * unique * row + tokens * row + references * 2 * WORD,
        "write_log": 3 * unique * row + tokens * row + references * 2 * WORD,
        "group": references * 4 * WORD,
    }[op]
    return {
        "seconds": seconds / size.calls,
        "spread": spread / size.calls,
        "unique_rows": unique,
        "bytes": moved,
    }


def _loop(
    op: str, rows: jax.Array, weights: jax.Array, write_weight: jax.Array, backend: Backend
) -> Callable[[jax.Array, jax.Array, SlotGroups | None], tuple[jax.Array, jax.Array]]:
    """A loop over all calls; returns a part of every result, so that XLA removes no call."""

    def call(table: jax.Array, slot_ids: jax.Array, groups: SlotGroups | None) -> tuple[Any, Any]:
        if op == "read":
            return table, slot_read(table, slot_ids, weights, backend=backend).output[0]
        if op == "read_error":
            read = slot_read(
                *(table, slot_ids, weights),
                target=rows,
                write_weight=write_weight,
                backend=backend,
            )
            return table, (read.output[0], read.errors[0] if read.errors is not None else None)
        if op == "dot":
            return table, slot_dot(table, slot_ids, rows, backend=backend)[0]
        if op == "group":
            found = group_slots(slot_ids, num_slots=table.shape[0])
            return table, (found.order[0], found.slots[0], found.starts[0], found.rank[0])
        assert groups is not None
        if op == "write":
            return slot_add(table, groups, weights, rows, backend=backend), None
        added = slot_add(table, groups, weights, rows, with_old_rows=True, backend=backend)
        return added.values, added.old_rows[0]

    def run(table: jax.Array, ids: jax.Array, groups: SlotGroups | None) -> Any:
        def step(table: jax.Array, xs: tuple[jax.Array, SlotGroups | None]) -> Any:
            return call(table, *xs)

        return jax.lax.scan(step, table, (ids, groups))

    return run


def cases(
    op: str,
    *,
    size: str,
    recorded: Path | None,
    backends: tuple[Backend, ...],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """A row of results for every size, stream and implementation of one operation."""
    streams: tuple[Stream, ...] = ("random", "zipf")
    if op.startswith("write"):
        streams = (*streams, "hot10", "hot50")
    if recorded is not None:
        streams = (*streams, "recorded")
    for row_size in SIZES[size]:
        for stream in streams:
            slot_ids = slot_stream(row_size, stream, recorded)
            for backend in backends if op != "group" else backends[:1]:
                measured = row_times(op, row_size, slot_ids, backend=backend, repeats=repeats)
                sizes = {name: getattr(row_size, name) for name in ("slots", "value", "tokens")}
                yield {
                    "backend": backend if op != "group" else "xla",
                    "stream": stream,
                    **sizes,
                    "places": row_size.places,
                    **(fitted(recorded, row_size) if recorded and stream == "recorded" else {}),
                    **measured,
                }
