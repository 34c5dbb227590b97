"""The readout's loss with the kernel for rows of logits, and infinite logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.cross_entropy import linear_cross_entropy
from pallas_kernels import dispatch
from pallas_kernels.cross_entropy import row_cross_entropy, specs

TOKENS, MODEL, VOCAB = 3, 8, 4096 + 384  # One full tile and a rest.


def sample(dtype, *, bias):
    rngs = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(rngs[0], (TOKENS, MODEL), dtype),
        # The largest logits are in the last tile.
        jax.random.normal(rngs[1], (MODEL, VOCAB))
        * jnp.where(jnp.arange(VOCAB)[None] < 4096, 0.1, 2.0),
        jax.random.normal(rngs[2], (VOCAB,)) if bias else None,
        jnp.asarray([0, VOCAB - 1, 4095], jnp.int32),
        jax.random.uniform(rngs[3], (TOKENS,)) * jnp.asarray([1, 0, 1]),
    )


def value_and_gradients(arrays, backend):
    of_rows = functools.partial(row_cross_entropy, backend=backend)
    moving = (0, 1, 4) if arrays[2] is None else (0, 1, 2, 4)

    def loss(*arrays):
        return 0.3 * linear_cross_entropy(*arrays, block=2, of_rows=of_rows)

    return jax.jit(jax.value_and_grad(loss, argnums=moving))(*arrays)


@pytest.mark.by_default("bfloat16-False")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_whose_rows_are_a_kernels_has_the_plain_value_and_gradients(dtype, bias):
    arrays = sample(jnp.dtype(dtype), bias=bias)
    expected = value_and_gradients(arrays, "reference")
    with dispatch.interpret_kernels("gpu"):
        actual = value_and_gradients(arrays, "pallas")
    ratio = {"float32": 1e-5, "bfloat16": 4e-3}[dtype]

    def compare(a, e):
        assert a.dtype == e.dtype
        a, e = (np.asarray(x, np.float64) for x in (a, e))
        assert np.linalg.norm(a - e) <= ratio * np.linalg.norm(e)

    jax.tree.map(compare, actual, expected)


def test_the_plain_rows_are_those_of_the_core():
    arrays = sample(jnp.float32, bias=True)
    loss = functools.partial(linear_cross_entropy, block=3)
    auto = functools.partial(loss, of_rows=row_cross_entropy)
    programs = (jax.make_jaxpr(jax.grad(x))(*arrays) for x in (loss, auto))
    first, second = map(str, programs)
    assert first == second


@pytest.mark.slow
def test_infinite_logits_hide_words_as_in_plain_jax():
    arrays = specs.sample(specs.RowSpec(name="here", tokens=2, vocab=4096 + 128))
    hidden = jnp.arange(4096 + 128) < 4096  # All of the first tile.
    arrays["logits"] = jnp.where(hidden[None], -jnp.inf, arrays["logits"])
    arrays["labels"] = jnp.full((2,), 4100, jnp.int32)
    expected = row_cross_entropy(**arrays, dtype=jnp.float32, backend="reference")
    with dispatch.interpret_kernels("gpu"):
        actual = row_cross_entropy(**arrays, dtype=jnp.float32, backend="pallas")
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)
