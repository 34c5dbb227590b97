"""Mosaic GPU kernels: one warpgroup per token, its rows loaded eight at a time.

A token's slot ids and weights are scalars for all threads. Each thread holds four columns of every
row, so a row is one coalesced load, and the sum stays in registers. The load of a row depends on
the load of its id; many small programs per multiprocessor hide this latency.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import IN_FLIGHT, launch, row


def read(
    values: jax.Array,
    slot_ids: jax.Array,
    weights: jax.Array,
    target: jax.Array | None,
    write_weight: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """The output of `slot_read`, and its errors if targets are given."""
    tokens, places = slot_ids.shape
    result = jax.ShapeDtypeStruct((tokens, values.shape[1]), jnp.float32)

    def weighted(values, slot_ids, weights, token, first, count):
        rows = [row(values, slot_ids[token, first + p]) for p in range(count)]
        terms = [weights[token, first + p] * x.astype(jnp.float32) for p, x in enumerate(rows)]
        return functools.reduce(operator.add, terms)

    def summed(token, values, slot_ids, weights):
        full, rest = divmod(places, IN_FLIGHT)
        if not full:
            return weighted(values, slot_ids, weights, token, 0, rest)

        def step(i, total):
            first = i * IN_FLIGHT
            return total + weighted(values, slot_ids, weights, token, first, IN_FLIGHT)

        total = weighted(values, slot_ids, weights, token, 0, IN_FLIGHT)
        if full > 1:
            total = jax.lax.fori_loop(1, full, step, total)
        if rest:
            total += weighted(values, slot_ids, weights, token, full * IN_FLIGHT, rest)
        return total

    def read_body(token, values, slot_ids, weights, output):
        output[token] = summed(token, values, slot_ids, weights)

    def error_body(token, values, slot_ids, weights, target, write_weight, output, errors):
        total = summed(token, values, slot_ids, weights)
        output[token] = total
        errors[token] = write_weight[token] * (total - row(target, token))

    operands = (values, slot_ids, weights)
    if target is None:
        (output,) = launch(
            read_body, *operands, programs=tokens, out_type=[result], name="slot_read"
        )
        return output, None
    output, errors = launch(
        error_body,
        *(*operands, target, write_weight),
        programs=tokens,
        out_type=[result, result],
        name="slot_read_error",
    )
    return output, errors


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
        *(values, slot_ids, vectors),
        programs=tokens,
        out_type=[out_type],
        name="slot_dot",
    )
    return output
