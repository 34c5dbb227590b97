"""Residual sums with their norms, and the cotangents of both terms and of the scale."""

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm.specs import SPECS, sample
from tests.kernels.entry import Entry


def call(spec, backend, **arrays):
    return add_rms_norm(**arrays, eps=spec.eps, backend=backend)


ENTRY = Entry(
    op="add_rms_norm",
    specs=SPECS,
    sample=sample,
    call=call,
    kernels=("gpu",),
    differentiable=("x", "branch", "scale"),
)
