"""Norms of gated mixes, and the cotangents of both arrays and of the gate."""

from pallas_kernels.mix_rms_norm.api import op_of
from pallas_kernels.mix_rms_norm.specs import SPECS, sample
from tests.kernels.entry import Entry


def call(spec, backend, **arrays):
    return op_of(spec, "float32")(**arrays, backend=backend)


ENTRY = Entry(
    op="mix_rms_norm",
    specs=SPECS,
    sample=sample,
    call=call,
    kernels=("gpu",),
    differentiable=("x", "y", "gate"),
)
