"""Mosaic GPU kernels: one warpgroup per token, its rows loaded eight at a time.

A token's slot ids and weights are scalars for all threads. Each thread holds four columns of every
row, so a row is one coalesced load, and the sum stays in registers. The load of a row depends on
the load of its id; many small programs per multiprocessor hide this latency.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels.mosaic_gpu import IN_FLIGHT, launch, over_tables, row


@over_tables
def read(
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The output of `slot_read`, and its errors if targets are given."""
    if target is not None and write_weight is not None:
        arrays = (x[None] for x in (slot_ids, weights, target, write_weight))
        return read_chunk(values, jnp.zeros((), jnp.int32), *arrays)
    tokens = slot_ids.shape[0]

    def body(token, values, slot_ids, weights, output):
        output[token] = _weighted_sum(values, slot_ids, weights, (token,))

    (output,) = launch(
        body,
        values,
        slot_ids,
        weights,
        programs=tokens,
        out_type=[jax.ShapeDtypeStruct((tokens, values.shape[1]), jnp.float32)],
        name="slot_read",
    )
    return output, None


def read_chunk(
    values: jax.Array,
    chunk: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    targets: jax.Array,
    write_weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The output and the errors of one of many chunks, leaves `[chunks, ...]`, read in place."""
    _, tokens, _ = slot_ids.shape
    result = jax.ShapeDtypeStruct((tokens, values.shape[1]), jnp.float32)

    def body(token, values, chunk, slot_ids, weights, targets, write_weights, output, errors):
        place = chunk[0], token
        total = _weighted_sum(values, slot_ids, weights, place)
        output[token] = total
        errors[token] = PLAIN.error(total, row(targets, place), write_weights[place])

    output, errors = launch(
        body,
        values,
        chunk[None],
        slot_ids,
        weights,
        targets,
        write_weights,
        programs=tokens,
        out_type=[result, result],
        name="slot_read_error",
    )
    return output, errors


def _weighted_sum(values, slot_ids, weights, token):
    """The sum over the places of a token, whose index is a tuple."""
    full, rest = divmod(slot_ids.shape[-1], IN_FLIGHT)

    def some(first, count):
        rows = [row(values, slot_ids[*token, first + p]) for p in range(count)]
        # The loads of all these rows run together; the sum waits for the last.
        terms = [weights[*token, first + p] * x.astype(jnp.float32) for p, x in enumerate(rows)]
        return functools.reduce(operator.add, terms)

    # Fewer places than loads in flight need no loop.
    if not full:
        return some(0, rest)
    total = some(0, IN_FLIGHT)
    if full > 1:

        def step(i, total):
            return total + some(i * IN_FLIGHT, IN_FLIGHT)

        total = jax.lax.fori_loop(1, full, step, total)
    if rest:
        total += some(full * IN_FLIGHT, rest)
    return total


@over_tables
def dot(values: jax.Array, slot_ids: jax.Array, vectors: jax.Array) -> jax.Array:
    """The result of `slot_dot`: products in registers, summed across the warpgroup."""
    tokens, places = slot_ids.shape

    def body(token, values, slot_ids, vectors, output):
        vector = row(vectors, token)

        def some(first, count):
            rows = [row(values, slot_ids[token, first + p]) for p in range(count)]
            for p, x in enumerate(rows):
                output[token, first + p] = jnp.sum(x.astype(jnp.float32) * vector)

        full, rest = divmod(places, IN_FLIGHT)
        if full:
            jax.lax.fori_loop(0, full, lambda i, _: some(i * IN_FLIGHT, IN_FLIGHT), None)
        if rest:
            some(full * IN_FLIGHT, rest)

    out_type = jax.ShapeDtypeStruct((tokens, places), jnp.float32)
    (output,) = launch(
        body,
        values,
        slot_ids,
        vectors,
        programs=tokens,
        out_type=[out_type],
        name="slot_dot",
    )
    return output
