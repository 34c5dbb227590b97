"""Mosaic GPU kernel: what one exchange sends back to its tokens, one warpgroup per token.

Each row of cotangents in the log is loaded once, for the weighted sum and for the inner product
with the token's error. What the sum gives is needed for the inner products with the rows before the
write, so both belong to the same program.
"""

import jax
import jax.numpy as jnp

from fwpkm_jax.core.slots.values.exchange import ChunkRows
from fwpkm_jax.core.slots.write import PLAIN
from pallas_kernels.mosaic_gpu import IN_FLIGHT, index32, launch, row, zeros


def back(
    log: jax.Array,
    chunk: jax.Array,
    next_rows: jax.Array,
    rank: jax.Array,
    rows: ChunkRows,
    output: jax.Array,
    output_bar: jax.Array,
) -> tuple[jax.Array, ChunkRows]:
    """The cotangents of a chunk's reads before the write, and of what it read and wrote.

    Arguments as `core.slots.values.exchange.exchange_back`; `rank` is that of its groups.
    """
    _, tokens, places = rank.shape
    width, distinct = output.shape[2], next_rows.shape[1]

    def body(token, log, chunk, next_rows, rank, steps, targets, weights, *refs):
        output, output_bar, *outs = refs
        read_bar, weights_bar, steps_bar, targets_bar, error_weights_bar = outs
        chunk = chunk[0]
        read, target = (row(x, (chunk, token)) for x in (output, targets))
        # The way back of one row's error is that of the formula, traced into this kernel.
        error, of_error = jax.vjp(PLAIN.error, read, target, weights[chunk, token])

        # One load of a row serves the weighted sum and the inner product with the error.
        def read_and_dot(first, count, total):
            places = [first + p for p in range(count)]
            rows = [row(log, next_rows[chunk, rank[chunk, token, p]]) for p in places]
            for p, x in zip(places, rows, strict=True):
                total += steps[chunk, token, p] * x
                steps_bar[token, p] = jnp.sum(x * error)
            return total

        errors_bar = _by_groups(places, read_and_dot, zeros(width))
        bar, targets_bar[token], error_weights_bar[token] = of_error(errors_bar)
        # What later chunks send back, and what this chunk's own error does.
        bar = row(output_bar, (chunk, token)) + bar
        read_bar[token] = bar

        def dot(first, count, _):
            places = [first + p for p in range(count)]
            rows = [row(log, chunk * distinct + rank[chunk, token, p]) for p in places]
            for p, x in zip(places, rows, strict=True):
                weights_bar[token, p] = jnp.sum(x * bar)

        _by_groups(places, dot, None)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    of_values, of_places = shape(tokens, width), shape(tokens, places)
    read_bar, weights_bar, steps_bar, targets_bar, error_weights_bar = launch(
        body,
        log,
        chunk[None],
        next_rows,
        rank,
        rows.steps,
        rows.targets,
        rows.error_weights,
        output,
        output_bar,
        programs=tokens,
        out_type=[of_values, of_places, of_places, of_values, shape(tokens)],
        name="slot_back",
    )
    return read_bar, ChunkRows(weights_bar, steps_bar, targets_bar, error_weights_bar)


def _by_groups(places, step, carry):
    """`carry = step(first, count, carry)` over groups of places that are loaded together."""
    full, rest = divmod(places, IN_FLIGHT)
    if full:
        carry = jax.lax.fori_loop(
            0, full, lambda i, carry: step(index32(i) * IN_FLIGHT, IN_FLIGHT, carry), carry
        )
    return step(full * IN_FLIGHT, rest, carry) if rest else carry
