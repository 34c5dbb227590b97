"""Residual sums with their norms under bfloat16 and inside a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.norms import RMSNorm
from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import add_rms_norm, specs
from pallas_kernels.checks import relative_errors, results_of

SPEC = specs.NormSpec(name="here", length=5, width=256)


@pytest.mark.thorough
@pytest.mark.parametrize("branch", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_under_bfloat16_results_and_cotangents_are_the_float32_ones_rounded(branch):
    spec = specs.NormSpec(name="here", length=5, width=256, branch=branch)
    half = specs.sample(spec, jnp.bfloat16)
    exact = {k: x if x is None else x.astype(jnp.float32) for k, x in half.items()}
    op = functools.partial(add_rms_norm, eps=spec.eps)
    expected = results_of(op, exact)("reference")
    with dispatch.interpret_kernels("gpu"):
        actual = results_of(op, half)("pallas")
    for total in jax.tree.leaves((actual[0], actual[1][0]["x"])):
        assert total.dtype == jnp.bfloat16
    assert actual[1][0]["scale"].dtype == jnp.float32
    # Twice 2^-9: the sum is rounded before it is normed.
    assert max(relative_errors(actual, expected).values()) < 4e-3


@pytest.mark.parametrize("offset", [True, False])
def test_a_norm_after_a_sum_is_the_norm_of_the_sum_bit_for_bit(offset):
    norm = RMSNorm(256, offset=offset)
    norm.weight[...] = jax.random.normal(jax.random.key(0), (256,))
    x, branch = (specs.sample(SPEC, jnp.bfloat16)[name] for name in ("x", "branch"))
    graphdef, params = nnx.split(norm)

    def plain(params, x, branch):
        total = x + branch
        return total, nnx.merge(graphdef, params)(total)

    def together(params, x, branch):
        return tuple(nnx.merge(graphdef, params).after_sum(x, branch))

    def results(function):
        outputs, back = jax.vjp(function, params, x, branch)
        return outputs, back(outputs)

    actual, expected = (jax.jit(results, static_argnums=0)(f) for f in (together, plain))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
