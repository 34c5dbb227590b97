"""The gated delta rule: outputs, final memory, and the cotangents of every argument."""

from pallas_kernels.gated_delta.api import OP, chunk_gated_delta_rule
from pallas_kernels.gated_delta.specs import SPECS, sample
from tests.kernels.entry import Entry

ENTRY = Entry(
    op=OP,
    specs=SPECS,
    sample=sample,
    call=lambda spec, backend, **arrays: chunk_gated_delta_rule(**arrays, backend=backend),
    differentiable=("query", "key", "value", "log_decay", "beta", "initial_state"),
    kernels=("tpu",),
    ratio=2e-6,
    vjp_ratio=1e-5,
)
