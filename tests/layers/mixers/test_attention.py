"""What gated attention alone promises; the rest is in test_contract.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.mixers.persistent import PersistentTokens
from fwpkm_jax.layers.rotary import YarnConfig
from tests.layers.mixers.own_mixer import RunningSum

SMALL = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, rotary_fraction=0.5)


def make(config, model_dim=6):
    return Attention(config, model_dim, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0))


def sample(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_paper_configuration_has_the_published_tensors():
    layer = nnx.eval_shape(lambda: make(AttentionConfig(), 768))
    shapes = {
        "/".join(map(str, path)): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert shapes == {  # [in, out]: the transpose of the released weights.
        "q_proj/kernel": (768, 1536),
        "k_proj/kernel": (768, 256),
        "v_proj/kernel": (768, 256),
        "o_proj/kernel": (768, 768),
        "q_norm/weight": (64,),
        "k_norm/weight": (64,),
    }


@pytest.mark.slow
def test_a_single_token_returns_its_gated_value():
    layer, x = make(SMALL), sample(1, 1, 6)
    gates = (x @ layer.q_proj.kernel[...]).reshape(2, 2, 4)[:, 1]  # Per head: query, gate.
    value = (x @ layer.v_proj.kernel[...]).reshape(1, 4)
    expected = (jax.nn.sigmoid(gates) * value).reshape(1, 1, 8) @ layer.o_proj.kernel[...]
    np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough("6")
@pytest.mark.parametrize("length", [5, 6, 13])  # Within the window, masked, blockwise.
def test_a_window_sees_itself_and_the_tokens_just_before(length):
    window = 5
    layer = make(dataclasses.replace(SMALL, window=window))
    x = sample(1, length, 6)

    def last_output(x):
        return layer(x)[0][0, -1]

    reach = np.any(np.asarray(jax.jit(jax.jacobian(last_output))(x)) != 0, axis=(0, 1, 3))
    np.testing.assert_array_equal(reach, np.arange(length) >= length - window)


@pytest.mark.thorough
def test_full_attention_past_its_cache_sees_the_latest_tokens_however_it_is_cut():
    x = np.asarray(sample(2, 11, 6))
    expected = jax.jit(make(dataclasses.replace(SMALL, window=4)))(x)[0]
    layer = make(SMALL)
    call = jax.jit(lambda x, cache: layer(x, cache=cache))
    for lengths in ([11], [3, 1, 3, 1, 3], [1] * 11):
        cache, outputs, start = layer.init_cache(2, max_length=4, dtype=x.dtype), [], 0
        for length in lengths:
            output, cache = call(x[:, start : start + length], cache)
            outputs.append(output)
            start += length
        actual = np.concatenate(outputs, axis=1)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_windowed_cache_does_not_grow_with_the_stream():
    layer = make(dataclasses.replace(SMALL, window=3))
    cache = layer.init_cache(2, max_length=100_000, dtype=jnp.bfloat16)
    assert cache.keys.shape == (2, 3, 1, 4)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16


@pytest.mark.slow
def test_yarn_changes_at_evaluation_without_touching_parameters():
    plain = make(SMALL)
    config = dataclasses.replace(SMALL, yarn=YarnConfig(factor=8.0, original_length=64))
    stretched = make(config)
    params = nnx.state(plain, nnx.Param)
    nnx.update(stretched, params)
    x = sample(1, 9, 6)
    first, second = plain(x)[0], stretched(x)[0]
    assert np.max(np.abs(first - second)) > 1e-3
    # A single token has no distance to anything, so positions cannot matter.
    np.testing.assert_allclose(plain(x[:, :1])[0], stretched(x[:, :1])[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 is not a multiple"),
        ({"window": 0}, "window=0"),
        ({"rope_theta": 1.0}, "rope_theta=1.0"),
        ({"rotary_fraction": 1.5}, "rotary_fraction=1.5"),
        ({"rotary_fraction": 0.1, "head_dim": 8}, "turns 0 dimensions"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


@pytest.mark.thorough
def test_persistent_tokens_stand_before_each_document_in_its_window():
    """Of a row, and of a stream cut within a document, with padding; without resets they leak."""
    mixer = PersistentTokens(make(dataclasses.replace(SMALL, window=4)), 3, 6, rngs=nnx.Rngs(1))
    x, lengths = sample(1, 12, 6), (1, 6, 5)
    starts = np.zeros((1, 12), bool)
    starts[0, [0, 1, 7]] = True

    @jax.jit
    def outputs(x, starts):
        alone = [x[:, first : first + size] for first, size in zip((0, 1, 7), lengths, strict=True)]
        cache, pieces = mixer.init_cache(1, max_length=12, dtype=x.dtype), []
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=9.0)
        marks, real = jnp.pad(starts, ((0, 0), (2, 0))), (jnp.arange(14) >= 2)[None]
        for at in (slice(0, 5), slice(5, 14)):
            y, cache = mixer(padded[:, at], mask=real[:, at], starts=marks[:, at], cache=cache)
            pieces.append(y)
        streamed = jnp.concatenate(pieces, axis=1)[:, 2:]
        apart = jnp.concatenate([mixer(document)[0] for document in alone], axis=1)
        return mixer(x, starts=starts)[0], streamed, apart

    packed, streamed, apart = outputs(x, jnp.asarray(starts))
    np.testing.assert_allclose(packed, apart, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(streamed, apart, rtol=1e-5, atol=1e-6)
    leaky = outputs(x, jnp.zeros_like(starts))[0]
    assert np.min(np.max(np.abs(leaky - apart)[0, [1, 7]], axis=-1)) > 1e-2


def test_persistent_tokens_refuse_documents_around_a_mixer_that_cannot_begin_with_them():
    def call(inner):
        mixer = PersistentTokens(inner, 2, 6, rngs=nnx.Rngs(1))
        jax.eval_shape(lambda x: mixer(x, starts=jnp.ones((1, 3), bool)), sample(1, 3, 6))

    with pytest.raises(ValueError, match="PersistentTokens takes no rows of several documents"):
        call(RunningSum())
    with pytest.raises(ValueError, match="window=None: persistent tokens go with a window"):
        call(make(SMALL))


@pytest.mark.slow
def test_a_cache_behind_persistent_tokens_grows_by_as_many_tokens():
    mixer = PersistentTokens(make(SMALL), 2, 6, rngs=nnx.Rngs(1))
    short, long = (mixer.init_cache(1, max_length=n, dtype=jnp.float32) for n in (3, 5))
    grown = mixer.grow_cache(short, 5)
    assert [mixer.capacity(cache) for cache in (short, grown)] == [3, 5]
    jax.tree.map(np.testing.assert_array_equal, grown, long)
