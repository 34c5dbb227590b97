"""SwiGLU against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mlp import SwiGLU
from pallas_kernels import dispatch


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_a_gpu_gate_and_up_are_one_product_with_the_same_results(dtype, monkeypatch):
    layer = SwiGLU(8, 24, init_std=0.5, dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8), dtype)

    def results(params, x):
        outputs, back = jax.vjp(lambda p, x: nnx.merge(graphdef, p)(x, whole=True), params, x)
        return outputs, back(jnp.ones_like(outputs))

    def products():
        return str(jax.make_jaxpr(lambda *x: results(*x))(params, x)).count("dot_general")

    expected, apart = jax.jit(results)(params, x), products()
    with dispatch.compile_kernels("gpu"):
        actual, together = jax.jit(results)(params, x), products()
        monkeypatch.setenv(dispatch.REFERENCE_VARIABLE, "merged_projections")
        assert products() == apart
    assert (apart, together) == (9, 6)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=tolerance, atol=tolerance
        ),
        actual,
        expected,
    )
