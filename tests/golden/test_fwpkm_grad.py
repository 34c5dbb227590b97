"""Gradients through the writes, second order included, against the authors' release."""

import jax
import jax.numpy as jnp

from tests.golden import vectors
from tests.golden.test_fwpkm_forward import run

KIND = "fwpkm_grad"


def test_gradients_through_the_writes(golden_path, dtype):
    file = vectors.open_file(golden_path, dtype)
    results, (forward, names, inputs) = run(file)
    present = [i for i, x in enumerate(inputs) if x is not None]

    def scalar(*inputs):
        return jnp.sum(forward(*inputs)[1].output * file.arrays["cotangent"])

    gradients = jax.jit(jax.grad(scalar, argnums=present))(*inputs)
    for index, gradient in zip(present, gradients, strict=True):
        results[f"d_{names[index]}"] = gradient
    results.pop("scores")
    file.assert_matches(results)
