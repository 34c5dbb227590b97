"""The short convolution: results, and the cotangents of projection, earlier inputs and taps."""

from pallas_kernels.short_convolution.api import OP, short_convolution
from pallas_kernels.short_convolution.specs import SPECS, sample
from tests.kernels.entry import Entry


def call(spec, backend, **arrays):
    return short_convolution(**arrays, parts=spec.parts, backend=backend)


ENTRY = Entry(
    op=OP,
    specs=SPECS,
    sample=sample,
    call=call,
    differentiable=("x", "before", "weight"),
    kernels=("gpu",),
    ratio=1e-6,
    vjp_ratio=2e-6,
)
