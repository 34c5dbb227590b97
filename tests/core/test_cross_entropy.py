"""The readout's loss in blocks against the plain loss over all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.cross_entropy import linear_cross_entropy

MODEL, VOCAB = 5, 11


def sample(tokens, *, bias=True, dtype=np.float64):
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(tokens, MODEL)), dtype),
        jnp.asarray(rng.normal(size=(MODEL, VOCAB)), dtype),
        jnp.asarray(rng.normal(size=VOCAB), dtype) if bias else None,
        jnp.asarray(rng.integers(VOCAB, size=tokens), jnp.int32),
        jnp.asarray(rng.uniform(0, 2, tokens) * (rng.uniform(size=tokens) < 0.7), dtype),
    )


def plain(x, head, bias, labels, weights):
    logits = x @ head if bias is None else x @ head + bias[None]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -jnp.sum(chosen[:, 0] * weights)


def value_and_gradients(loss, arrays):
    arguments = (0, 1, 4) if arrays[2] is None else (0, 1, 2, 4)
    # Not 1: the backward pass scales what the forward pass has formed.
    gradient = jax.value_and_grad(lambda *x: 0.3 * loss(*x), argnums=arguments)
    # A CPU would otherwise keep float32 where the program asks for bfloat16.
    return jax.jit(gradient, compiler_options={"xla_allow_excess_precision": False})(*arrays)


@pytest.mark.by_default("7-3-True", "8-4-False", "6-100-True", thorough=["1-4-True"])
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "block"), [(1, 4), (7, 3), (8, 4), (9, 9), (6, 100)])
def test_the_loss_in_blocks_equals_the_plain_loss_and_its_gradients(tokens, block, bias):
    arrays = sample(tokens, bias=bias)
    expected = value_and_gradients(plain, arrays)
    actual = value_and_gradients(lambda *x: linear_cross_entropy(*x, block=block), arrays)
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-12), actual, expected
    )
    value = jax.jit(lambda *x: linear_cross_entropy(*x, block=block))(*arrays)
    np.testing.assert_allclose(0.3 * value, expected[0], rtol=1e-12)


def test_logits_and_sums_are_float32_under_bfloat16_activations():
    arrays = sample(64, dtype=np.float32)
    half = (arrays[0].astype(jnp.bfloat16), *arrays[1:])
    exact = tuple(x if x is None else x.astype(jnp.float32) for x in half[:3])
    exact = (exact[0], exact[1].astype(jnp.bfloat16).astype(jnp.float32), exact[2], *arrays[3:])
    expected, (_, d_head, _, _) = value_and_gradients(plain, exact)
    value, (d_x, d_head_blocks, _, _) = value_and_gradients(
        lambda *x: linear_cross_entropy(*x, block=5), half
    )
    assert (value.dtype, d_x.dtype, d_head_blocks.dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # In bfloat16 it would be 1e-2.
    error = jnp.linalg.norm(d_head_blocks - d_head) / jnp.linalg.norm(d_head)
    assert error < 4e-3  # The products' operands are rounded to bfloat16, their sums are not.


def test_no_array_of_all_logits_is_made():
    tokens, vocab = 4096, 1000
    shapes = [(tokens, 8), (8, vocab), (tokens,), (tokens,)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    x, head, labels, weights = map(jax.ShapeDtypeStruct, shapes, dtypes)

    def gradient(x, head, labels, weights):
        def loss(x, head):
            return linear_cross_entropy(x, head, None, labels, weights, block=128)

        return jax.grad(loss, argnums=(0, 1))(x, head)

    compiled = jax.jit(gradient).lower(x, head, labels, weights).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * vocab * 4 / 4


def test_a_block_without_tokens_is_refused():
    with pytest.raises(ValueError, match="block=0"):
        linear_cross_entropy(*sample(3, dtype=np.float32), block=0)
