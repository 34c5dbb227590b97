"""Gradients through the writes, second order included, against the authors' release."""

import jax
import jax.numpy as jnp

from tests.golden import vectors
from tests.golden.test_fwpkm_forward import INPUTS, forward_and_inputs

KIND = "fwpkm_grad"


def test_gradients_through_the_writes(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    forward, inputs = forward_and_inputs(file)
    present = [i for i, x in enumerate(inputs) if x is not None]

    def scalar(*inputs):
        output, results = forward(*inputs)
        return jnp.sum(output * file.arrays["cotangent"]), results

    gradients, results = jax.jit(jax.grad(scalar, argnums=present, has_aux=True))(*inputs)
    for index, gradient in zip(present, gradients, strict=True):
        results[f"d_{INPUTS[index]}"] = gradient
    results.pop("scores")
    file.assert_matches(results)
