"""Weighted sums of rows and their errors, and the cotangents of every array."""

from pallas_kernels.slot_read.api import slot_read
from pallas_kernels.slot_read.specs import SPECS, sample
from tests.kernels.entry import Entry


def interpreted_only(**specs):
    """Leaves all but some specs to the devices.

    Interpreting takes a second or more per case, and on the GPU's side a millisecond per load (it
    calls back to Python): those named here take every branch of the kernels.
    """

    def not_interpreted(kernel, spec):
        if spec.name in specs[kernel]:
            return None
        return f"other specs interpret the same branches on the {kernel}'s side"

    return not_interpreted


def call(spec, backend, *, target, write_weight, **arrays):
    errors = {"target": target, "write_weight": write_weight} if spec.errors else {}
    return tuple(slot_read(**arrays, **errors, backend=backend))


ENTRY = Entry(
    op="slot_read",
    specs=SPECS,
    sample=sample,
    call=call,
    differentiable=("values", "weights", "target", "write_weight"),
    ratio=2e-6,
    vjp_has_kernels=False,
    not_interpreted=interpreted_only(
        tpu=("one_token", "63_tokens", "100_tokens", "many_places", "many_tiles"),
        gpu=("one_token",),
    ),
)
