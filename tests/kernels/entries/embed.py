"""Rows of embeddings, and the cotangent of the table."""

from pallas_kernels.embed import embed
from pallas_kernels.embed.specs import SPECS, sample
from tests.kernels.entry import Entry


def call(spec, backend, **arrays):
    return embed(**arrays, backend=backend)


ENTRY = Entry(
    op="embed",
    specs=SPECS,
    sample=sample,
    call=call,
    kernels=("gpu",),
    differentiable=("table",),
    # A sum of few of the cotangents, whose cosines two programs round differently.
    vjp_ratio=1e-4,
    outputs_have_kernels=False,
)
