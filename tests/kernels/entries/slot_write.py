"""One normalised step on the touched rows, and the cotangents of every array."""

from pallas_kernels.slot_write.api import slot_write
from pallas_kernels.slot_write.specs import SPECS, sample_write
from tests.kernels.entries.slot_read import interpreted_only
from tests.kernels.entry import Entry

ENTRY = Entry(
    op="slot_write",
    specs=[spec for spec in SPECS if spec.name in ("63_tokens", "zipf", "hot", "chunk")],
    sample=sample_write,
    call=lambda spec, backend, **arrays: slot_write(
        **arrays, step_size=8.0, learning_rate=0.5, backend=backend
    ),
    kernels=("tpu", "gpu", "tpu_sparse_core"),
    differentiable=("values", "weights", "errors"),
    ratio=2e-6,
    vjp_has_kernels=False,
    not_interpreted=interpreted_only(tpu=("zipf",), gpu=(), tpu_sparse_core=()),
)
