"""SwiGLU against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.layers.mlp import SwiGLU


def test_swiglu_is_down_of_silu_gate_times_up():
    layer = SwiGLU(4, 6, init_std=0.5, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    gate, up, down = (
        np.asarray(linear.kernel[...], np.float64)
        for linear in (layer.gate_proj, layer.up_proj, layer.down_proj)
    )
    expected = (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_parameters_are_float32_without_biases_and_of_the_given_spread():
    layer = SwiGLU(64, 192, init_std=0.02, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert sorted(leaf.shape for leaf in leaves) == [(64, 192), (64, 192), (192, 64)]
    for leaf in leaves:
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(np.std(leaf), 0.02, rtol=0.05)
    assert layer(jnp.ones((1, 1, 64), jnp.bfloat16)).dtype == jnp.bfloat16
