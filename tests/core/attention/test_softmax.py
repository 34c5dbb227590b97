"""Causal attention: masked and blockwise, against a plain loop and each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.attention import softmax as softmax_attention
from fwpkm_jax.core.attention.softmax import (
    blockwise_attention,
    masked_attention,
    query_block_attention,
    whole_sequence_attention,
)


def sample(seed=0, *, batch=2, queries=6, keys=6, heads=4, kv_heads=2, head=3):
    rng = np.random.default_rng(seed)
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)]
    return [rng.normal(size=(batch, *shape, head)) for shape in shapes]


def plain_loop(query, key, value, query_positions, key_positions, window):
    output = np.zeros(query.shape)
    shared_by = query.shape[2] // key.shape[2]
    for b, q, h in np.ndindex(query.shape[:3]):
        at, key_at = query_positions[b, q], key_positions[b]
        seen = [
            k for k, p in enumerate(key_at) if 0 <= p <= at and (window is None or at - p < window)
        ]
        if seen:
            keys, values = key[b, seen, h // shared_by], value[b, seen, h // shared_by]
            weights = np.exp(keys @ query[b, q, h] / np.sqrt(query.shape[-1]))
            output[b, q, h] = weights @ values / np.sum(weights)
    return output


@pytest.mark.parametrize("window", [None, 1, 3])
def test_masked_attention_equals_a_plain_loop(window):
    arrays = sample(queries=4, keys=7)
    query_positions = np.array([[3, 4, 5, -1], [0, 1, 2, 3]])
    key_positions = np.array([[-1, 1, 2, 3, 4, 5, -1], [-1, -1, -1, 0, 1, 2, 3]])
    expected = plain_loop(*arrays, query_positions, key_positions, window)
    with jax.enable_x64(True):
        output = masked_attention(
            *map(jnp.asarray, arrays),
            query_positions=jnp.asarray(query_positions),
            key_positions=jnp.asarray(key_positions),
            window=window,
        )
    assert output.dtype == np.float64
    np.testing.assert_allclose(output, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    window=st.integers(1, 5),
    queries=st.integers(1, 17),
    before=st.integers(0, 7),
    padding=st.integers(0, 4),
    kv_heads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_blockwise_attention_equals_masked_attention(
    window, queries, before, padding, kv_heads, seed
):
    """With `before` earlier tokens, of which the window holds some, and padding at the end."""
    arrays = sample(seed, queries=queries, keys=window + queries, heads=2, kv_heads=kv_heads)
    positions = before + np.arange(-window, queries)
    positions[positions < 0] = -1
    positions[len(positions) - min(padding, queries) :] = -1
    positions = jnp.asarray(np.stack([positions] * 2))
    options = {
        "query_positions": positions[:, window:],
        "key_positions": positions,
        "window": window,
    }
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in arrays]

        def output_and_gradients(attention):
            output, pullback = jax.vjp(lambda *x: attention(*x, **options), *arrays)
            return output, pullback(jnp.cos(jnp.arange(output.size)).reshape(output.shape))

        masked, blockwise = jax.jit(
            lambda: tuple(map(output_and_gradients, (masked_attention, blockwise_attention)))
        )()
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12),
            blockwise,
            masked,
        )


@pytest.mark.thorough
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    arrays = [jnp.asarray(x, jnp.float32) for x in sample()]
    hidden = jnp.full((2, 6), -1)

    def run(*arrays):
        return masked_attention(*arrays, query_positions=hidden, key_positions=hidden, window=None)

    np.testing.assert_array_equal(run(*arrays), 0)
    gradients = jax.grad(lambda *x: jnp.sum(run(*x)), argnums=(0, 1, 2))(*arrays)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


@pytest.mark.thorough
def test_bfloat16_scores_are_summed_in_float32():
    # 256 equal terms of 1/16: bfloat16 sums of them would stall at 16 instead of reaching 32.
    query = jnp.full((1, 2, 1, 512), 0.25, jnp.bfloat16)
    key = query.at[:, 1].set(0.251)
    value = jnp.broadcast_to(jnp.asarray([0.0, 1.0])[None, :, None, None], (1, 2, 1, 512))
    positions = jnp.arange(2)[None]
    output = masked_attention(
        query,
        key,
        value.astype(jnp.bfloat16),
        query_positions=positions,
        key_positions=positions,
        window=None,
    )
    near = key[0, :, 0].astype(jnp.float32) @ query[0, 1, 0].astype(jnp.float32) / 512**0.5
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(output[0, 1, 0, 0], jax.nn.softmax(near)[1], rtol=4e-3)


def test_wrong_shapes_are_named():
    query, key, value = (jnp.asarray(x, jnp.float32) for x in sample(heads=3))
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    options = {"query_positions": positions, "key_positions": positions, "window": 2}
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        masked_attention(query, key, value, **options)
    with pytest.raises(ValueError, match="put window=2 keys"):
        blockwise_attention(query, key, value, **options)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("queries", "block"), [(7, 3), (6, 2), (5, 8)])
def test_query_blocks_equal_masked_attention_and_its_gradients(queries, block, window):
    arrays = sample(queries=queries, keys=queries)
    positions = np.broadcast_to(np.arange(queries), (2, queries)).copy()
    positions[1, -2:] = -1
    options = {"query_positions": positions, "key_positions": positions, "window": window}
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in arrays]
        options = jax.tree.map(lambda x: x if isinstance(x, int) else jnp.asarray(x), options)

        def output_and_gradients(attention, arrays, **more):
            output, pullback = jax.vjp(lambda *x: attention(*x, **options, **more), *arrays)
            return output, pullback(jnp.cos(jnp.arange(output.size)).reshape(output.shape))

        @jax.jit
        def both(arrays):
            expected = output_and_gradients(masked_attention, arrays)
            return output_and_gradients(query_block_attention, arrays, block=block), expected

        actual, expected = both(arrays)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12), actual, expected
        )


def test_long_sequences_form_no_square_of_scores():
    length, head = 4096, 8
    shapes = [(1, length, heads, head) for heads in (2, 1, 1)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def gradient(query, key, value, positions):
        def loss(*arrays):
            return jnp.sum(whole_sequence_attention(*arrays, positions=positions, window=None))

        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    compiled = jax.jit(gradient).lower(*arrays, positions).compile()
    square = 2 * length**2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < square


def test_cudnn_by_name_runs_or_says_why_not():
    arrays = [jnp.asarray(x, jnp.float32) for x in sample()]
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    if jax.default_backend() != "gpu":
        with pytest.raises(ValueError, match=r"the device is a .*; use backend='xla'"):
            whole_sequence_attention(*arrays, positions=positions, window=None, backend="cudnn")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "head", "named"), [("float32", 8, "float32"), ("bfloat16", 12, "width 12")]
)
def test_on_a_gpu_auto_logs_why_it_is_not_cudnn(dtype, head, named, monkeypatch, caplog):
    monkeypatch.setattr(softmax_attention.jax, "default_backend", lambda: "gpu")
    arrays = [jnp.asarray(x, dtype) for x in sample(head=head)]
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    whole_sequence_attention(*arrays, positions=positions, window=2)
    assert named in caplog.text
    with pytest.raises(ValueError, match=named):
        whole_sequence_attention(*arrays, positions=positions, window=2, backend="cudnn")


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 3])
def test_cudnn_is_asked_for_the_same_window_and_padding(window, monkeypatch):
    """cuDNN itself needs a GPU; here its place is taken by the same call's plain implementation."""
    plain = jax.nn.dot_product_attention
    asked = []

    def stand_in(*arrays, implementation, **options):
        asked.append(implementation)
        with jax.numpy_dtype_promotion("standard"):
            return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(softmax_attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(softmax_attention.jax.nn, "dot_product_attention", stand_in)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in sample(head=8)]
    positions = jnp.asarray([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])
    output = whole_sequence_attention(*arrays, positions=positions, window=window)
    expected = masked_attention(
        *arrays, query_positions=positions, key_positions=positions, window=window
    )
    assert asked == ["cudnn"]
    np.testing.assert_allclose(
        output.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2
    )
    np.testing.assert_array_equal(output[1, 4:].astype(jnp.float32), 0)
