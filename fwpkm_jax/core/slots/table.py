"""One chunk's reads from and writes to a table of slot values."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import (
    SlotIds,
    SlotWeights,
    TokenValues,
    TokenWeights,
    ValueTable,
)
from fwpkm_jax.core.checks import check_arrays


def slot_read(values: ValueTable, slot_ids: SlotIds, weights: SlotWeights) -> TokenValues:
    """Weighted sums of slot values, one per token (Eq. 11).

    Args:
      values: `[slots, value]`.
      slot_ids: `[tokens, places]`, each below `slots`.
      weights: `[tokens, places]`.
    """
    check_arrays(
        values=(values, "float slots value"),
        slot_ids=(slot_ids, "int tokens places"),
        weights=(weights, "float tokens places"),
    )
    rows = values.at[slot_ids].get(mode="promise_in_bounds")
    return jnp.einsum("tp,tpv->tv", weights, rows, precision=jax.lax.Precision.HIGHEST)


def slot_counts(
    slot_ids: SlotIds, counted: TokenWeights, *, num_slots: int
) -> Float[Array, "tokens places"]:
    """How often the chunk read each place's slot, counting the tokens with `counted` = 1."""
    counters = jnp.zeros((num_slots,), counted.dtype)
    increments = jnp.broadcast_to(counted[:, None], slot_ids.shape)
    counters = counters.at[slot_ids].add(increments, mode="promise_in_bounds")
    return counters.at[slot_ids].get(mode="promise_in_bounds")


def write_steps(
    weights: Float[Array, "*n tokens places"],
    counts: Float[Array, "*n tokens places"],
    *,
    step_size: float,
) -> Float[Array, "*n tokens places"]:
    """The write, the only definition of it: the multiple of a token's error that each place adds.

        V[i] += sum over the places (t, p) that read slot i of steps[t, p] * error[t]
        steps[t, p] = -step_size * weights[t, p] / max(n[i], 1)

    A slot so moves by `step_size` times the mean of its readers' weighted errors (Eqs. 13-17).
    Every executor takes its steps from here: `slot_write` below (plain), `value_run` (whole
    sequences), `block_write` (long chunks), `value_step` (with retention).

    Args:
      weights: read weights.
      counts: n, how often the chunk reads each place's slot.
      step_size: multiplies the gradient; heads * top_k makes one write move a typical prediction
        by about its whole error, since the mean read weight is the reciprocal.

    References: Zhao and Jones 2026, arXiv:2601.00671, section 3.
    """
    return -step_size * weights / jnp.maximum(counts, 1.0)


def slot_write(
    values: ValueTable,
    slot_ids: SlotIds,
    weights: SlotWeights,
    errors: TokenValues,
    *,
    counted: TokenWeights,
    step_size: float,
    learning_rate: float = 1.0,
    clip: float | None = None,
    weight_decay: float = 0.0,
) -> ValueTable:
    """The table after one write, by `write_steps` in plain JAX.

    Untouched rows are neither read nor written, and in a loop the table is updated in place,
    unless `clip` or `weight_decay` is set: these need the whole gradient and cost a dense pass.

    Args:
      values: `[slots, value]`.
      slot_ids: `[tokens, places]`.
      weights: read weights, `[tokens, places]`.
      errors: write weight times (prediction - target), `[tokens, value]`.
      counted: 1 for tokens whose reads count in n, `[tokens]`.
      step_size: see `write_steps`.
      learning_rate: multiplies the step after clipping.
      clip: bound on each element of the gradient, or None.
      weight_decay: adds this multiple of the table to the gradient.
    """
    check_arrays(
        values=(values, "float slots value"),
        slot_ids=(slot_ids, "int tokens places"),
        weights=(weights, "float tokens places"),
        errors=(errors, "float tokens value"),
        counted=(counted, "float tokens"),
    )
    counts = slot_counts(slot_ids, counted, num_slots=values.shape[0])
    steps = write_steps(weights, counts, step_size=step_size)
    gradients = -steps[:, :, None] * errors[:, None, :]
    if clip is None and weight_decay == 0.0:
        return values.at[slot_ids].add(-learning_rate * gradients, mode="promise_in_bounds")
    gradient = jnp.zeros_like(values).at[slot_ids].add(gradients, mode="promise_in_bounds")
    if clip is not None:
        gradient = jnp.clip(gradient, -clip, clip)
    return values - learning_rate * (gradient + weight_decay * values)


def update_norm(before: ValueTable, after: ValueTable, slot_ids: SlotIds) -> Float[Array, ""]:
    """Euclidean norm of the table's change, from the touched rows alone.

    Args:
      before: `[slots, value]`.
      after: the table after a write.
      slot_ids: the slots that it touched, `[tokens, places]`.
    """
    change = after.at[slot_ids].get(mode="promise_in_bounds") - before.at[slot_ids].get(
        mode="promise_in_bounds"
    )
    squares = jnp.sum(change**2, axis=-1)
    # A row read n times appears n times.
    ones = jnp.ones(slot_ids.shape[:1], squares.dtype)
    return jnp.sqrt(jnp.sum(squares / slot_counts(slot_ids, ones, num_slots=before.shape[0])))
