"""Addresses, weights and their cotangents.

Among thousands of random scores a few differ by less than float32's rounding, and may swap: one id
in a thousand may differ, which in the small shapes is none.
"""

import jax
import numpy as np

from pallas_kernels.product_top_k import select_slots
from pallas_kernels.product_top_k.api import OP
from pallas_kernels.product_top_k.specs import SPECS, sample
from tests.kernels.entries.slot_read import interpreted_only
from tests.kernels.entry import Entry, equal_or_close

RATIO, VJP_RATIO = 2e-6, 1e-5
SWAPPED = 1e-3
# jax 0.10's XLA takes 12 seconds to compile the 119 pairs of the GPU's merge for a CPU.
MERGES_QUICKLY = ("top_32",) if jax.__version_info__ >= (0, 11) else ()


def call(spec, backend, **arrays):
    normalization = "head" if spec.score == "dot" else "token"
    return select_slots(
        **arrays, top_k=spec.top_k, score=spec.score, normalization=normalization, backend=backend
    )


def compare(actual, expected):
    for ids in ("slot_ids", "sub_key_ids"):
        different = np.not_equal(*(np.asarray(getattr(x.address, ids)) for x in (actual, expected)))
        assert different.sum() <= SWAPPED * different.size, ids
    for scores in ("slot_scores", "sub_key_scores"):  # Sorted, whichever of a near tie is first.
        pair = (getattr(x.address, scores) for x in (actual, expected))
        equal_or_close(*pair, ratio=RATIO)
    equal_or_close(actual.weights, expected.weights, ratio=RATIO)


def compare_cotangents(actual, expected):
    queries = np.asarray(expected["queries"])
    errors = np.linalg.norm(np.asarray(actual["queries"]) - queries, axis=-1)
    sizes = np.linalg.norm(queries, axis=-1)
    swapped = ~(errors <= 10 * VJP_RATIO * (sizes + np.mean(sizes)))
    assert swapped.sum() <= SWAPPED * swapped.size, "queries"
    # Each swapped token pulls at one sub-key in place of another.
    ratio = VJP_RATIO + float(np.sqrt(np.mean(swapped)))
    equal_or_close(actual["keys"], expected["keys"], ratio=ratio)


ENTRY = Entry(
    op=OP,
    specs=SPECS,
    sample=sample,
    call=call,
    differentiable=("queries", "keys"),
    not_interpreted=interpreted_only(
        tpu=("one_token", "63_tokens", "two_tiles", "top_32", "odd_sizes", "ties"),
        gpu=("63_tokens", "two_tiles", "ties", *MERGES_QUICKLY),
    ),
    compare=compare,
    compare_cotangents=compare_cotangents,
    vjp_has_kernels=False,
)
