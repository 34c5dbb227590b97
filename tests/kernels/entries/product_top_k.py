"""Addresses and weights; at the paper's widths, unlike the small shapes, near ties may swap."""

from pallas_kernels.product_top_k import product_top_k
from pallas_kernels.product_top_k.api import OP
from pallas_kernels.product_top_k.specs import SPECS, sample
from tests.kernels.entry import Entry


def call(spec, backend, **arrays):
    normalization = "head" if spec.score == "dot" else "token"
    return product_top_k(
        **arrays, top_k=spec.top_k, score=spec.score, normalization=normalization, backend=backend
    )


ENTRY = Entry(
    op=OP,
    specs=SPECS,
    sample=sample,
    call=call,
    differentiable=("queries", "keys"),
    kernels=("tpu", "gpu"),
    ratio=2e-6,
    vjp_has_kernels=False,
)
