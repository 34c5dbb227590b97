"""Properties of the short convolution that the shared parity test does not cover."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.checks import result_errors
from pallas_kernels.short_convolution import Part, joined_inputs, short_convolution
from pallas_kernels.short_convolution.specs import COMPARISON, SPECS, sample
from pallas_kernels.short_convolution.specs import call as compared

SPEC = next(spec for spec in SPECS if spec.name == "packed")


def call(spec, **options):
    return functools.partial(short_convolution, parts=spec.parts, **options)


@pytest.mark.thorough
def test_results_are_what_a_loop_over_tokens_gives():
    spec = dataclasses.replace(SPEC, length=5, groups=8, documents=0.4)
    arrays = sample(spec, jnp.float32)
    actual = jax.jit(call(spec, backend="reference"))(**arrays)
    x, before, weight = (np.asarray(arrays[name], np.float64) for name in ("x", "before", "weight"))
    numbers = np.pad(np.asarray(arrays["documents"])[0], (3, 0))
    inputs = np.concatenate([before[0], joined_inputs(arrays["x"], spec.parts)[0]])
    expected = np.zeros((5, inputs.shape[1]))
    for t in range(5):
        for j in range(4):
            if numbers[t + j] == numbers[t + 3]:
                expected[t] += weight[j] * inputs[t + j]
    expected = expected / (1 + np.exp(-expected))
    unit = expected[:, :512].reshape(5, 8, 64)
    unit = unit / np.sqrt(np.sum(unit**2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(actual[0][0], unit.reshape(5, -1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual[1][0], expected[:, 512:], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(actual[2], x[..., 128:].reshape(1, 5, -1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["packed", "flat", "wide_values"])
def test_kernels_agree_with_the_reference_in_both_dtypes_of_results(name, dtype):
    spec = next(spec for spec in SPECS if spec.name == name)
    with dispatch.interpret_kernels("gpu"):
        op = functools.partial(compared, spec, jnp.dtype(dtype))
        errors = result_errors(op, sample(spec, jnp.bfloat16))
    # XLA may leave out the reference's rounding of cotangents.
    assert max(errors.values()) <= COMPARISON.ratios["bfloat16"] / 2


@pytest.mark.slow
def test_inputs_of_other_documents_do_not_pass_even_if_they_are_no_numbers():
    arrays = sample(dataclasses.replace(SPEC, length=4), jnp.float32)
    arrays["documents"] = jnp.asarray([[0, 1, 1, 1]])
    arrays["x"] = arrays["x"].at[:, 0].set(jnp.nan)
    with dispatch.interpret_kernels("gpu"):
        convolve = call(SPEC, backend="pallas")
        outputs, back = jax.vjp(lambda x: convolve(**(arrays | {"x": x}))[:2], arrays["x"])
        (d_x,) = back(jax.tree.map(lambda y: y.at[:, 0].set(0), outputs))
    for y in outputs:
        assert np.isfinite(y[:, 1:]).all()
    assert np.isfinite(d_x[:, 1:]).all()


def test_parts_that_are_not_the_columns_are_errors():
    arrays = sample(SPEC, jnp.float32)
    with pytest.raises(ValueError, match="parts have 64 columns of the 192"):
        short_convolution(**arrays, parts=(Part(64),))
    with pytest.raises(ValueError, match="head must divide the width"):
        short_convolution(**arrays, parts=(Part(64, 60), *SPEC.parts[1:]))
