"""What Gated DeltaNet alone promises; the rest is in test_contract.py."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers import gated_delta_net
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemory, MatrixMixerConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES
from pallas_kernels import dispatch
from pallas_kernels.short_convolution import joined_inputs

SMALL = GatedDeltaNetConfig(
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=3,
    value_head_dim=5,
    chunk_size=4,
    decay_start="constant",
)


def make(config, model_dim=6, seed=0):
    return GatedDeltaNet(config, model_dim, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(seed))


def sample(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_paper_configuration_has_the_published_tensors():
    layer = nnx.eval_shape(lambda: make(GatedDeltaNetConfig(), 768))
    shapes = {
        "/".join(map(str, path)): leaf.shape
        for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert shapes == {  # [in, out]: the transpose of the released weights.
        "in_proj_qkvz/kernel": (768, 2048),
        "in_proj_ba/kernel": (768, 16),
        "out_proj/kernel": (512, 768),
        "conv_weight": (4, 1536),
        "A_log": (8,),
        "dt_bias": (8,),
        "norm/weight": (64,),
    }


@pytest.mark.thorough
def test_fused_projections_are_grouped_by_key_head():
    layer, x = make(SMALL), sample(1, 2, 6)
    projections = layer.project(x)
    qkvz = np.asarray(x @ layer.in_proj_qkvz.kernel[...]).reshape(1, 2, 2, 3 + 3 + 10 + 10)
    ba = np.asarray(x @ layer.in_proj_ba.kernel[...]).reshape(1, 2, 2, 2 + 2)
    np.testing.assert_allclose(projections.qkvz, qkvz, rtol=1e-5)
    joined = [qkvz[..., part].reshape(1, 2, -1) for part in (slice(3), slice(3, 6), slice(6, 16))]
    conv_inputs = joined_inputs(projections.qkvz, SMALL.projected_parts)
    np.testing.assert_allclose(conv_inputs, np.concatenate(joined, -1), rtol=1e-5)
    beta = 1 / (1 + np.exp(-ba[..., :2].reshape(1, 2, 4)))
    np.testing.assert_allclose(projections.beta, beta, rtol=1e-5)
    softplus = np.log1p(np.exp(ba[..., 2:].reshape(1, 2, 4) + 1))
    log_decay = -np.exp(layer.A_log[...]) * softplus
    np.testing.assert_allclose(projections.log_decay, log_decay, rtol=1e-5)


@pytest.mark.slow
def test_the_rule_in_the_frame_of_all_rules_is_the_same_layer_with_other_weight_names():
    sizes: Any = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}
    # The frame leaves queries unscaled, which the norm takes back up to its epsilon.
    options: Any = {"norm_eps": 1e-12, "init_std": 0.5, "rngs": nnx.Rngs(0)}
    published = GatedDeltaNet(SMALL, 6, **options)
    rule = MATRIX_RULES["gated_deltanet"]()
    framed: Any = MatrixMemory(rule, MatrixMixerConfig(rule=rule, **sizes), 6, **options)
    by_head = published.in_proj_qkvz.kernel[...].reshape(6, 2, -1)
    parts = jnp.split(by_head, (3, 6, 16), axis=-1)  # Queries, keys, values, output gates.
    framed.in_proj.kernel[...] = jnp.concatenate([x.reshape(6, -1) for x in parts], axis=1)
    b, a = jnp.split(published.in_proj_ba.kernel[...].reshape(6, 2, -1), 2, axis=-1)
    framed.strength_proj.kernel[...] = b.reshape(6, 4)
    framed.strength_proj.bias[...] = jnp.zeros((4,))
    framed.decay_proj.kernel[...] = a.reshape(6, 4)
    framed.decay_proj.bias[...] = published.dt_bias[...]
    framed.log_rate[...] = published.A_log[...]
    framed.conv_weight[...] = published.conv_weight[...]
    framed.out_proj.kernel[...] = published.out_proj.kernel[...]
    x = sample(2, 13, 6)
    np.testing.assert_allclose(framed(x)[0], published(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_chunk_size_changes_nothing():
    x = sample(2, 13, 6)
    outputs = [
        jax.jit(lambda x, size=size: make(dataclasses.replace(SMALL, chunk_size=size))(x)[0])(x)
        for size in (1, 5, 64)
    ]
    for output in outputs[1:]:
        np.testing.assert_allclose(output, outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_convolution_of_width_one_needs_no_past():
    layer, x = make(dataclasses.replace(SMALL, conv_width=1)), sample(2, 5, 6)
    cache = layer.init_cache(2, max_length=5, dtype=x.dtype)
    assert cache.conv_inputs.shape == (2, 0, SMALL.conv_channels)
    call = jax.jit(lambda x, cache: layer(x, cache=cache))
    first, cache = call(x[:, :2], cache)
    second, _ = call(x[:, 2:], cache)
    pieces = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(pieces, call(x, None)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_decay_starts_uniform_in_zero_to_sixteen():
    config = dataclasses.replace(SMALL, num_key_heads=1, num_value_heads=4096, value_head_dim=1)
    layer = make(config)
    rates = np.exp(np.asarray(layer.A_log[...]))
    assert np.all(np.isfinite(layer.A_log[...]))
    assert rates.min() > 0
    assert rates.max() <= 16 * (1 + 1e-6)
    # Quantiles of 4096 draws: three standard errors of the median are 0.4.
    np.testing.assert_allclose(np.quantile(rates, [0.25, 0.5, 0.75]), [4, 8, 12], atol=0.4)
    np.testing.assert_array_equal(layer.dt_bias[...], 1)


def test_a_chunk_without_tokens_is_refused():
    with pytest.raises(ValueError, match="chunk_size=0 is too small; use 1"):
        GatedDeltaNetConfig(chunk_size=0)


@pytest.mark.slow
def test_the_kernels_give_the_same_output_and_gradients():
    x, mask = sample(2, 7, 6), jnp.arange(7)[None, :] < jnp.asarray([7, 5])[:, None]

    def run(backend):
        layer = make(
            dataclasses.replace(SMALL, num_key_heads=1, num_value_heads=2, backend=backend)
        )

        @nnx.jit
        @nnx.value_and_grad
        def loss(layer):
            return jnp.sum(jnp.sin(layer(x, mask=mask)[0]))

        value, gradients = loss(layer)
        return value, nnx.to_pure_dict(gradients)

    with dispatch.interpret_kernels("tpu"):
        actual = run("pallas")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        actual,
        run("reference"),
    )


@pytest.mark.by_default("1")
@pytest.mark.parametrize("length", [1, 12])
def test_the_rule_gets_activations_in_their_own_dtype(monkeypatch, length):
    taken = {}

    def recorded(rule):
        def run(query, key, value, **options):
            taken.update(query=query.dtype, key=key.dtype, value=value.dtype)
            taken.update({name: options[name].dtype for name in ("log_decay", "initial_state")})
            return rule(query, key, value, **options)

        return run

    for name in ("recurrent_gated_delta_rule", "chunk_gated_delta_rule"):
        monkeypatch.setattr(gated_delta_net, name, recorded(getattr(gated_delta_net, name)))
    config = GatedDeltaNetConfig(
        num_key_heads=1, num_value_heads=2, key_head_dim=4, value_head_dim=4
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = GatedDeltaNet(config, 8, dtype=dtype, rngs=nnx.Rngs(0))
        jax.eval_shape(lambda x, layer=layer: layer.mix(x)[0], jnp.ones((1, length, 8), dtype))
        inside = dict.fromkeys(("query", "key", "value"), dtype)
        assert taken == inside | {"log_decay": jnp.float32, "initial_state": jnp.float32}
