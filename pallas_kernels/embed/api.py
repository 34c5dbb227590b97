"""The rows of an embedding: XLA reads them, and a kernel adds up their cotangents."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.slots.values.grouping import group_slots
from pallas_kernels.checks import assert_results_agree, refuse_rows
from pallas_kernels.dispatch import Backend, Kernel, implementation, module_of
from pallas_kernels.embed import reference
from pallas_kernels.embed.specs import CHECK_RATIO, CHECKED, SPECS, sample

OP = "embed"


def embed(
    table: Float[Array, "vocab width"],
    tokens: Int[Array, "*dims"],
    *,
    backend: Backend = "auto",
) -> Float[Array, "*dims width"]:
    """The rows of the tokens; NaN for an id outside the table, so that no other row stands for it.

    XLA adds a table's gradient up by atomic additions on a GPU, in the order in which they happen.
    With the kernel of `slot_add` each row has one owner, which adds its tokens in their order, so
    that two runs agree bit for bit.

    Args:
      table: for the kernel float32, width a multiple of 128.
      tokens: row of each token; negative ones count from the end.
      backend: "auto", "reference" or "pallas".

    Raises:
      ValueError: `backend="pallas"` on a platform without a kernel.
      NotImplementedError: `backend="pallas"` with a width or dtype that the kernel does not take.
    """
    chosen = implementation(
        OP,
        backend,
        kernels=("gpu",),
        supports=functools.partial(_refusal, table, tokens),
        check=check_rows,
        uses=("slot_add",),
    )
    if chosen == "reference":
        return reference.embed(table, tokens)
    return _run(chosen, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(chosen: Kernel, table: jax.Array, tokens: jax.Array) -> jax.Array:
    del chosen
    return reference.embed(table, tokens)


def _run_forward(chosen, table, tokens):
    # Of the table, the backward pass needs its shape alone.
    return _run(chosen, table, tokens), (tokens, jnp.zeros((table.shape[0], 0)))


def _run_backward(chosen, saved, rows_bar):
    tokens, like = saved
    return _summed(chosen, like.shape[0], tokens, rows_bar), None


_run.defvjp(_run_forward, _run_backward)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _summed(chosen: Kernel, vocab: int, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """The sum of the tokens' rows for each id, `[vocab, width]`."""
    ids = tokens.reshape(-1)
    ids = jnp.where(ids < 0, ids + vocab, ids)
    exists = (ids >= 0) & (ids < vocab)
    # What has no row of the table adds nothing to its first one.
    rows = jnp.where(exists[:, None], rows.reshape(ids.size, -1), 0.0)
    groups = group_slots(jnp.where(exists, ids, 0)[:, None], num_slots=vocab)
    table = jnp.zeros((vocab, rows.shape[1]), rows.dtype)
    ones = jnp.ones((ids.size, 1), rows.dtype)
    add = module_of("slot_add", chosen).add
    return add(table, groups, ones, rows, with_old_rows=False)[0]


def _refusal(table: jax.Array, tokens: jax.Array, kernel: Kernel) -> str | None:
    """None, or why the kernel does not add up such rows."""
    if table.dtype != jnp.float32:
        return f"a table in {table.dtype}, only float32"
    if tokens.size == 0:
        return f"tokens of shape {tokens.shape}, at least one"
    return refuse_rows(table, (), kernel)


def check_rows(kernel: Kernel) -> None:
    """Runs the kernel on this device; raises if it differs from the reference."""
    del kernel  # It is the one of this device.
    for spec in (spec for spec in SPECS if spec.name in CHECKED):
        assert_results_agree(embed, sample(spec, jnp.float32), ratio=CHECK_RATIO)
