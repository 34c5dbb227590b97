"""Gradients of the memory block, through its writes and in bfloat16."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeight
from fwpkm_jax.rules import FwPKM, fwpkm
from tests.layers.memory_block import (
    BATCH,
    CHUNK,
    CONFIG,
    LENGTH,
    MODEL,
    layer_of,
    params_of,
    sample,
    start,
    whole,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow_cases("value", "gate")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["query", "value", "gate"])
def test_gradients_reach_each_projection_through_the_writes(name):
    """The block mixes no tokens: only the writes take the first chunk to later outputs."""
    params, memory, x = params_of(), start(), sample()
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=x.shape)
    cotangent[:, :CHUNK] = 0
    first = jnp.asarray((np.arange(LENGTH) < CHUNK).astype(np.float64))[None, :, None]
    module = f"{name}_proj"
    direction = jnp.asarray(rng.normal(size=getattr(params, module).kernel[...].shape))

    def matches(path):
        return module in str(path) and "kernel" in str(path)

    @jax.jit
    def loss(step):
        """Moves a projection of the first chunk's tokens alone."""
        layer = layer_of(params)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf + step * direction if matches(path) else leaf, params
        )
        here, there = (one.signals(x, None) for one in (layer, layer_of(moved)))
        signals = jax.tree.map(
            lambda a, b: jnp.where(first.reshape(1, -1, *[1] * (a.ndim - 2)) == 1, b, a),
            here,
            there,
        )
        rule = layer.config.rule
        sequence = rule.sequence(signals.query, signals.value, gate=signals.gate, chunk_size=CHUNK)
        out = rule.run(jax.tree.map(lambda x: x[0], memory), sequence, chunk_size=CHUNK)
        return jnp.sum(jnp.asarray(cotangent) * layer.merge(out.output, signals, dtype=x.dtype))

    h = 1e-5
    expected = (loss(h) - loss(-h)) / (2 * h)
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(jax.grad(loss)(0.0), expected, rtol=1e-5)


@pytest.mark.slow
def test_the_incoming_stream_gets_the_gradient_of_finite_differences():
    params, memory, x = params_of(), start(), sample()
    rng = np.random.default_rng(2)
    cotangent, direction = (jnp.asarray(rng.normal(size=x.shape)) for _ in range(2))
    mask = jnp.ones((BATCH, LENGTH)).at[0, 5:].set(0)

    def loss(x):
        return jnp.sum(cotangent * whole(params, x, memory, mask)[0])

    h = 1e-5
    expected = (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)
    np.testing.assert_allclose(jnp.sum(direction * jax.grad(loss)(x)), expected, rtol=1e-5)


@pytest.mark.slow
def test_bfloat16_activations_leave_a_float32_memory_and_finite_gradients():
    layer = FastWeight(
        CONFIG, MODEL, norm_eps=1e-5, init_std=0.5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(layer)
    memory = layer.init_memory(jax.random.key(0))
    x = sample().astype(jnp.bfloat16)

    @jax.jit
    def gradients(params, x):
        def loss(params, x):
            y, after, _ = nnx.merge(graphdef, params)(x, memory)
            assert y.dtype == jnp.bfloat16
            chex.assert_trees_all_equal_shapes_and_dtypes(after, memory)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(params, x)

    chex.assert_tree_all_finite(jax.tree.leaves(gradients(params, x)))


@pytest.mark.thorough("l2")
@pytest.mark.parametrize("query_norm", ["none", "l2"])
def test_queries_that_stay_in_bfloat16_change_no_bit(query_norm, monkeypatch):
    config = dataclasses.replace(CONFIG, query_norm=query_norm)
    layer = FastWeight(config, MODEL, init_std=0.5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    memory, x = layer.init_memory(jax.random.key(0)), sample().astype(jnp.bfloat16)
    found = []
    moved = fwpkm.move_keys

    def recorded(keys, queries, *weights, **how):
        found.append(queries.dtype)
        return moved(keys, queries, *weights, **how)

    monkeypatch.setattr(fwpkm, "move_keys", recorded)

    def results():
        def loss(params, x):
            y, after, _ = nnx.merge(graphdef, params)(x, memory)
            return jnp.sum(jnp.cos(y.astype(jnp.float32))), (y, after)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    narrow = results()
    monkeypatch.setattr(FwPKM, "keeps_bfloat16_queries", False)
    wide = results()
    assert found == [jnp.bfloat16 if query_norm == "none" else jnp.float32, jnp.float32]
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)
