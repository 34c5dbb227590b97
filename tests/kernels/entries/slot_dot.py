"""Inner products with rows, and the cotangents of table and vectors."""

from pallas_kernels.slot_read.api import slot_dot
from pallas_kernels.slot_read.specs import SPECS, sample_dot
from tests.kernels.entries.slot_read import interpreted_only
from tests.kernels.entry import Entry

ENTRY = Entry(
    op="slot_dot",
    specs=SPECS,
    sample=sample_dot,
    call=lambda spec, backend, **arrays: slot_dot(**arrays, backend=backend),
    differentiable=("values", "vectors"),
    ratio=2e-6,
    vjp_has_kernels=False,
    not_interpreted=interpreted_only(
        tpu=("one_reference", "63_tokens", "many_places", "many_tiles"),
        gpu=("63_tokens",),
    ),
)
