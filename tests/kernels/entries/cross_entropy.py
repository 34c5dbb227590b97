"""Cross-entropies of rows of logits and their gradients, in float32 and bfloat16."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cross_entropy import row_cross_entropy
from pallas_kernels.cross_entropy.specs import SPECS, sample
from tests.kernels.entry import Entry, equal_or_close


def call(spec, backend, **arrays):
    del spec
    losses, slopes = row_cross_entropy(**arrays, dtype=jnp.float32, backend=backend)
    _, rounded = row_cross_entropy(**arrays, dtype=jnp.bfloat16, backend=backend)
    return losses, slopes, rounded


def compare(actual, expected):
    equal_or_close(actual[:2], expected[:2], ratio=5e-6)
    assert actual[2].dtype == expected[2].dtype
    rounded, exact = np.asarray(actual[2], np.float32), np.asarray(expected[1])
    np.testing.assert_allclose(rounded, exact, rtol=2**-8, atol=1e-9)


ENTRY = Entry(
    op="cross_entropy",
    specs=SPECS,
    sample=sample,
    call=call,
    kernels=("gpu",),
    differentiable=(),
    compare=compare,
    vjp_has_kernels=False,
)
