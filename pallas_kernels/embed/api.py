"""The rows of an embedding: XLA reads them, and a kernel adds up their cotangents."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from fwpkm_jax.core.slots.values.grouping import group_slots
from pallas_kernels.dispatch import Backend, Kernel, Operation, custom_vjp
from pallas_kernels.refusals import refusal, refuse_rows
from pallas_kernels.row_gradients import add

WIDEST = 1024
"""Widest rows of the kernel, whose threads hold several of them in registers."""


def embed(
    table: Float[Array, "vocab width"],
    tokens: Integer[Array, "*dims"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "*dims width"]:
    """The rows of the tokens; NaN for an id outside the table, so that no other row stands for it.

    XLA adds a table's gradient up by atomic additions on a GPU, in the order in which they happen.
    With the kernel of `slot_add` each row has one owner, which adds its tokens in their order, so
    that two runs agree bit for bit.

    Args:
      table: for the kernel float32, width a multiple of 128 up to 1,024.
      tokens: row of each token; negative ones count from the end.
      backend: as of `dispatch.Operation.choose`, errors included.
    """
    chosen = EMBED.choose(backend, table, tokens)
    if chosen == "reference":
        # Filled, not clipped: an id outside must not read like the last row.
        return table.at[tokens].get(mode="fill", fill_value=jnp.nan)
    return _rows(chosen, table.shape[0], table, tokens)


@custom_vjp(fixed=2)
def _rows(chosen: Kernel, vocab: int, table: jax.Array, tokens: jax.Array) -> jax.Array:
    return embed(table, tokens, backend="reference")


def _rows_forward(chosen, vocab, table, tokens):
    return _rows(chosen, vocab, table, tokens), tokens


def _rows_backward(chosen, vocab, tokens, rows_bar):
    return _summed(chosen, vocab, tokens, rows_bar), None


_rows.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _summed(chosen: Kernel, vocab: int, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum of the tokens' rows for each id, `[vocab, width]`."""
    # Narrow and unsigned ids would wrap around at the size of the table.
    ids = tokens.reshape(-1).astype(jnp.int32)
    ids = jnp.where(ids < 0, ids + vocab, ids)
    exists = (ids >= 0) & (ids < vocab)
    # Tokens outside the table are taken to its first row, and add zeros there.
    rows = jnp.where(exists[:, None], rows.reshape(ids.size, -1), 0.0)
    groups = group_slots(jnp.where(exists, ids, 0)[:, None], num_slots=vocab)
    table = jnp.zeros((vocab, rows.shape[1]), rows.dtype)
    ones = jnp.ones((ids.size, 1), rows.dtype)
    return add(chosen, False, table, groups, ones, rows)[0]


def _refuses(kernel: Kernel, table: jax.Array, tokens: jax.Array) -> str | None:
    found = refusal(
        (table.dtype != jnp.float32, f"a table in {table.dtype}, only float32"),
        (tokens.size == 0, f"tokens of shape {tokens.shape}, at least one"),
        (table.shape[1] > WIDEST, f"rows of {table.shape[1]} values, at most {WIDEST}"),
    )
    return found or refuse_rows(kernel, table)


EMBED = Operation("embed", _refuses, kernels=("gpu",), uses=("slot_add",))
