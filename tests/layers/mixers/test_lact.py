"""LaCT: a static SwiGLU without steps, learned starts, a place in the decoder, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers.lact import LaCT, LaCTConfig
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig

CONFIG = LaCTConfig(
    num_heads=2, num_fast_heads=2, hidden_dim=4, chunk_size=3, window=4, low_rank=2, base_rate=0.5
)
LENGTH = 10


def build(config=CONFIG):
    return LaCT(config, 8, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0))


def sample(seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, LENGTH, 8)), jnp.float32)


@pytest.mark.slow
def test_without_steps_the_fast_networks_are_static_swiglus():
    layer, x = build(), sample()
    layer.rate_proj.bias.set_value(jnp.full((6,), -1e4))
    query, key, value = jnp.split(layer.qkv_proj(x), 3, axis=-1)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
    tokens = layer.fast_tokens(x, query, key, value, positions)
    np.testing.assert_array_equal(tokens.rates, 0)
    np.testing.assert_allclose(jnp.linalg.norm(tokens.query, axis=-1), 1, rtol=1e-3)
    gate, down, up = layer.initial_memory(1, x.dtype).weights
    expected = np.zeros((2, LENGTH, 8), np.float32)
    for head in range(2):
        q, part = tokens.query[:, :, head], slice(4 * head, 4 * head + 4)
        read = (jax.nn.silu(q @ gate[0, head].T) * (q @ up[0, head].T)) @ down[0, head].T
        normed = read / np.sqrt(np.mean(np.square(read), axis=-1, keepdims=True) + 1e-5)
        expected[..., part] = normed * jax.nn.silu(layer.scale_proj(x)[..., head : head + 1])
    attended, _ = layer.attend(query, key, value, positions, None, None)
    # Rows are rescaled by norm / (norm + 1e-5) at every write, the norms hide most of that.
    np.testing.assert_allclose(
        jax.jit(layer)(x)[0], layer.o_proj(attended + expected), rtol=1e-3, atol=1e-4
    )


@pytest.mark.thorough
def test_without_momentum_and_scale_a_layer_is_one_that_learned_neither():
    """Momentum whose share is 0, and a scale that is 1 for every token, change nothing."""
    plain = build(dataclasses.replace(CONFIG, momentum=False, read_scale=False))
    layer = build()
    for name in ("momentum_proj", "scale_proj"):
        assert getattr(plain, name) is None
        projection = getattr(layer, name)
        projection.kernel.set_value(jnp.zeros_like(projection.kernel[...]))
        # SiLU is 1 at this number.
        number = {"momentum_proj": -1e4, "scale_proj": 1.2784645}[name]
        projection.bias.set_value(jnp.full_like(projection.bias[...], number))
    state, other = nnx.state(plain, nnx.Param), nnx.state(layer, nnx.Param)
    nnx.update(plain, {name: other[name] for name in state})
    x = sample()
    actual, expected = jax.jit(lambda: (plain(x)[0], layer(x)[0]))()
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.thorough
def test_every_sequence_starts_with_the_learned_weights():
    memory = build().initial_memory(2, jnp.float32)
    layer = build()
    half = 0.5 * np.eye(4)[None]
    for left, right, weights in (
        (layer.gate_left, layer.gate_right, memory.weights.gate),
        (layer.up_left, layer.up_right, memory.weights.up),
    ):
        np.testing.assert_allclose(weights[0], left[...] @ right[...] + half, rtol=1e-6)
        np.testing.assert_array_equal(weights[0], weights[1])
    assert all(np.all(m == 0) for m in memory.momentum)


@pytest.mark.thorough
def test_without_a_rank_the_first_matrices_are_whole():
    layer = build(dataclasses.replace(CONFIG, low_rank=None))
    memory = layer.initial_memory(2, jnp.float32)
    for whole, weights in ((layer.gate, memory.weights.gate), (layer.up, memory.weights.up)):
        np.testing.assert_array_equal(weights, np.broadcast_to(whole[...], weights.shape))
    x = sample()
    assert np.all(np.isfinite(jax.jit(lambda x: layer(x)[0])(x)))


@pytest.mark.thorough
def test_a_finished_chunk_is_read_beyond_the_window():
    layer, x = build(), sample()
    call = jax.jit(lambda x: layer(x)[0])
    moved = np.max(np.abs(call(x) - call(x.at[:, 0].add(1))), axis=(0, 2))
    assert np.all(moved[CONFIG.window :] > 1e-4)
    late = np.max(np.abs(call(x) - call(x.at[:, -2].add(1))), axis=(0, 2))
    np.testing.assert_array_equal(late[:-2], 0)


@pytest.mark.slow
def test_a_decoder_of_lact_layers_streams_and_starts_over():
    config = ModelConfig(
        vocab_size=11,
        model_dim=8,
        mixers=("lact", "lact"),
        mlp_dim=8,
        lact=CONFIG,
        init_std=0.3,
        branch_init_scale=0.5,
        activation_dtype="float32",
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(11, size=(2, LENGTH), dtype=np.int32)
    graphdef, params = nnx.split(model)
    whole = jax.jit(lambda params, ids: nnx.merge(graphdef, params)(ids, {}).logits)(params, tokens)

    @jax.jit
    def piece(params, tokens, stream):
        return nnx.merge(graphdef, params).stream(tokens, stream)

    stream = model.init_stream({}, batch=2, max_length=1)
    for _ in range(2):
        logits = []
        for part in (tokens[:, :4], tokens[:, 4:8], tokens[:, 8:]):
            out = piece(params, part, stream)
            stream = out.stream
            logits.append(out.logits)
        np.testing.assert_allclose(np.concatenate(logits, axis=1), whole, rtol=1e-4, atol=1e-4)
        stream = model.reset_caches(stream, pending=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0 is too small; use 1"),
        ({"base_rate": 0.0}, r"base_rate=0\.0 must be above 0"),
        ({"rope_theta": 1.0}, r"rope_theta=1\.0 must exceed 1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LaCTConfig(**changes)


@pytest.mark.parametrize("name", ["num_heads", "num_fast_heads"])
def test_heads_must_divide_the_width(name):
    with pytest.raises(ValueError, match=f"model_dim=8 does not divide into {name}=3"):
        build(LaCTConfig(**{"num_heads": 2, "num_fast_heads": 2, name: 3}))
