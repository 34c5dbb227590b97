"""The slow product-key memory against a softmax over the best of all slots."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.pkm import PKM, PKMConfig
from pallas_kernels import dispatch

MODEL, BATCH, LENGTH = 5, 2, 3
CONFIG = PKMConfig(num_subkeys=4, key_dim=6, value_dim=3, num_heads=2, top_k=3)


def build(config=CONFIG, **options):
    return PKM(config, MODEL, rngs=nnx.Rngs(0), **options)


def sample(dtype=np.float64):
    return jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, MODEL)), dtype)


def plain_linear(x, linear):
    return x @ np.asarray(linear.kernel[...], np.float64) + np.asarray(linear.bias[...], np.float64)


def by_search(layer, x):
    """Output and slots of one token: every slot scored, the best of each head read."""
    config, half = layer.config, layer.config.key_dim // 2
    query = plain_linear(x, layer.query_proj)
    if config.query_norm:
        query = query / np.sqrt(np.mean(query**2) + 1e-6) * np.asarray(layer.query_scale[...])
    keys, values = (np.asarray(p[...], np.float64) for p in (layer.keys, layer.values))
    read, slots = np.zeros(config.value_dim), []
    for head in range(config.num_heads):
        mine = query[head * config.key_dim : (head + 1) * config.key_dim]
        scores = np.add.outer(keys[head, 0] @ mine[:half], keys[head, 1] @ mine[half:]).ravel()
        best = np.argsort(-scores, kind="stable")[: config.top_k]
        weights = np.exp(scores[best])
        read += weights / weights.sum() @ values[best]
        slots += list(best)
    if config.gated:
        gate = plain_linear(x, layer.gate_proj)
        read = read * gate / (1 + np.exp(-gate))
    return plain_linear(read, layer.out_proj), slots


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{}, {"query_norm": False}, {"gated": False}, {"num_heads": 1, "top_k": 4}],
    ids=str,
)
def test_the_layer_reads_the_best_of_all_slots(options):
    with jax.enable_x64(True):
        layer, x = build(dataclasses.replace(CONFIG, **options)), sample()
        if layer.query_scale is not None:
            layer.query_scale[...] = layer.query_scale[...] + 0.1 * jnp.arange(
                layer.query_scale.shape[0], dtype=jnp.float32
            )
        y, slot_ids, _ = jax.jit(lambda x: layer(x))(x)
        for b, t in np.ndindex(BATCH, LENGTH):
            expected, slots = by_search(layer, np.asarray(x[b, t]))
            np.testing.assert_array_equal(slot_ids[b, t], slots)
            np.testing.assert_allclose(y[b, t], expected, rtol=1e-9, atol=1e-11)


class GivenQueries(nnx.Module):
    """Stands for a layer's projection and gives these queries for any tokens."""

    def __init__(self, queries):
        self.in_features, self.queries = MODEL, nnx.Variable(queries)

    def __call__(self, x):
        del x
        return self.queries[...]


@pytest.mark.thorough
def test_queries_are_normed_over_the_batch_or_by_running_statistics():
    """As the layer without a norm reads queries that are normed already."""
    config = dataclasses.replace(CONFIG, query_norm=False, query_batch_norm=True)
    with jax.enable_x64(True):
        layer, x, features = build(config), sample(), CONFIG.num_heads * CONFIG.key_dim
        rng = np.random.default_rng(1)
        mean, variance, scale, shift = rng.uniform(0.5, 1.5, size=(4, features))
        for name, value in (("mean", mean), ("variance", variance), ("scale", scale)):
            getattr(layer, f"query_{name}").set_value(jnp.asarray(value))
        layer.query_shift.set_value(jnp.asarray(shift))
        query = plain_linear(np.asarray(x), layer.query_proj)
        of_batch, running = (query.mean((0, 1)), query.var((0, 1))), (mean, variance)
        for batch_statistics, (centre, spread) in ((True, of_batch), (False, running)):
            normed = (query - centre) / np.sqrt(spread + 1e-5) * scale + shift
            plain = build(dataclasses.replace(config, query_batch_norm=False))
            plain.query_proj = GivenQueries(jnp.asarray(normed))
            for part in ("keys", "values"):
                getattr(plain, part).set_value(getattr(layer, part)[...])
            plain.gate_proj, plain.out_proj = layer.gate_proj, layer.out_proj
            read = jax.jit(layer, static_argnames="batch_statistics")
            out, expected = read(x, batch_statistics=batch_statistics), jax.jit(plain)(x)
            np.testing.assert_array_equal(out.slot_ids, expected.slot_ids)
            np.testing.assert_allclose(out.output, expected.output, rtol=1e-9, atol=1e-11)
            assert (out.statistics is not None) == batch_statistics
            if out.statistics is not None:
                tokens = BATCH * LENGTH
                np.testing.assert_allclose(out.statistics.mean, centre, rtol=1e-9)
                unbiased = spread * tokens / (tokens - 1)
                np.testing.assert_allclose(out.statistics.variance, unbiased, rtol=1e-9)


@pytest.mark.thorough
def test_only_the_slots_that_were_read_learn():
    layer, x = build(), sample(np.float32)
    graphdef, params = nnx.split(layer)

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)

    _, slot_ids, _ = jax.jit(layer)(x)
    assert slot_ids.shape == (BATCH, LENGTH, CONFIG.num_heads * CONFIG.top_k)
    rows = np.any(np.asarray(gradient(params)["values"][...]) != 0, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(rows), np.unique(slot_ids))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_kernels_give_the_outputs_and_gradients_of_plain_jax(kernel):
    x = sample(np.float32)

    def run(backend):
        graphdef, params = nnx.split(build(dataclasses.replace(CONFIG, backend=backend)))

        @jax.jit
        def outputs_and_gradients(params, x):
            def loss(params, x):
                y, slot_ids, _ = nnx.merge(graphdef, params)(x)
                return jnp.sum(y**2), (y, slot_ids)

            gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(params, x)
            return outputs, gradients

        return outputs_and_gradients(params, x)

    with dispatch.interpret_kernels(kernel):
        (y, slot_ids), gradients = run("pallas")
    (expected, expected_ids), expected_gradients = run("reference")
    np.testing.assert_array_equal(slot_ids, expected_ids)
    chex.assert_trees_all_close(y, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_kernel_asked_for_by_name_is_not_replaced():
    layer = build(dataclasses.replace(CONFIG, backend="pallas"))
    outside = dispatch._simulation(None)  # Whatever --backend says.
    with outside, pytest.raises(ValueError, match="no kernel for platform"):
        layer(sample(np.float32))


@pytest.mark.slow
def test_the_output_may_have_a_width_of_its_own():
    y, *_ = build(out_dim=7)(sample(np.float32))
    assert y.shape == (BATCH, LENGTH, 7)


@pytest.mark.thorough
def test_bfloat16_activations_have_finite_float32_gradients():
    graphdef, params = nnx.split(build(dtype=jnp.bfloat16))
    x = sample(jnp.bfloat16)

    @jax.jit
    def gradients(params):
        def loss(params):
            y, *_ = nnx.merge(graphdef, params)(x)
            assert y.dtype == jnp.bfloat16
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss)(params)

    leaves = jax.tree.leaves(gradients(params))
    chex.assert_type(leaves, jnp.float32)
    chex.assert_tree_all_finite(leaves)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in leaves)


@pytest.mark.slow
def test_initial_weights_have_their_stated_sizes():
    layer = PKM(PKMConfig(num_subkeys=32, key_dim=16, value_dim=25), 36, rngs=nnx.Rngs(0))
    assert np.max(np.abs(layer.keys[...])) <= 1 / 4
    np.testing.assert_allclose(np.std(layer.keys[...]), 1 / 4 / 3**0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(layer.values[...]), 1 / 5, rtol=0.05)
    np.testing.assert_allclose(np.std(layer.out_proj.kernel[...]), 1 / 6, rtol=0.1)
    np.testing.assert_allclose(np.std(layer.gate_proj.kernel[...]), 1 / 6, rtol=0.1)
    xavier = (6 / (36 + 4 * 16)) ** 0.5
    assert np.max(np.abs(layer.query_proj.kernel[...])) <= xavier
    np.testing.assert_allclose(np.std(layer.query_proj.kernel[...]), xavier / 3**0.5, rtol=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_dim": 3}, "key_dim=3 must be even"),
        ({"top_k": 5}, "top_k=5 must lie between 1 and num_subkeys=4"),
        ({"query_batch_norm": True}, "query_norm=True and query_batch_norm=True"),
        ({"num_heads": 0}, "num_heads=0 is too small"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **options)
