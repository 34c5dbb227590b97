"""Every operation under test, with what its kernels may differ by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.add_rms_norm import specs as add_rms_norm
from pallas_kernels.cross_entropy import row_cross_entropy
from pallas_kernels.cross_entropy import specs as cross_entropy
from pallas_kernels.embed import specs as embed
from pallas_kernels.gated_delta import specs as gated_delta
from pallas_kernels.mix_rms_norm import specs as mix_rms_norm
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.product_top_k import specs as product_top_k
from pallas_kernels.short_convolution import specs as short_convolution
from pallas_kernels.slot_add import specs as slot_add
from pallas_kernels.slot_read import specs as slot_read
from tests.kernels.entry import Entry, compared, equal_or_close, interpreted_only

OLD_JAX = jax.__version_info__ < (0, 11)  # TODO: drop once jax>=0.11.


def both_dtypes_of_losses(spec, backend, **arrays):
    losses, slopes = row_cross_entropy(**arrays, dtype=jnp.float32, backend=backend)
    _, rounded = row_cross_entropy(**arrays, dtype=jnp.bfloat16, backend=backend)
    return losses, slopes, rounded


def compare_losses(actual, expected):
    equal_or_close(actual[:2], expected[:2], ratio=5e-6)
    assert actual[2].dtype == expected[2].dtype
    rounded, exact = np.asarray(actual[2], np.float32), np.asarray(expected[1])
    np.testing.assert_allclose(rounded, exact, rtol=2**-8, atol=1e-9)


def read(spec, backend, *, target, write_weight, **arrays):
    errors = {"target": target, "write_weight": write_weight} if spec.errors else {}
    return tuple(slot_read.READS.call(spec, jnp.float32, **arrays, **errors, backend=backend))


def selection(spec, backend, **arrays):
    normalization = "head" if spec.score == "dot" else "token"
    return select_slots(
        **arrays, top_k=spec.top_k, score=spec.score, normalization=normalization, backend=backend
    )


SELECTION_RATIO, SELECTION_VJP_RATIO = 2e-6, 1e-5
SWAPPED = 1e-3
"""Among thousands of random scores a few differ by less than float32's rounding, and may swap: one
id in a thousand may differ, which in the small shapes is none."""


def compare_selections(actual, expected):
    for ids in ("slot_ids", "sub_key_ids"):
        different = np.not_equal(*(np.asarray(getattr(x.address, ids)) for x in (actual, expected)))
        assert different.sum() <= SWAPPED * different.size, ids
    for scores in ("slot_scores", "sub_key_scores"):  # Sorted, whichever of a near tie is first.
        pair = (getattr(x.address, scores) for x in (actual, expected))
        equal_or_close(*pair, ratio=SELECTION_RATIO)
    equal_or_close(actual.weights, expected.weights, ratio=SELECTION_RATIO)


def compare_selections_cotangents(actual, expected):
    queries = np.asarray(expected["queries"])
    errors = np.linalg.norm(np.asarray(actual["queries"]) - queries, axis=-1)
    sizes = np.linalg.norm(queries, axis=-1)
    swapped = ~(errors <= 10 * SELECTION_VJP_RATIO * (sizes + np.mean(sizes)))
    assert swapped.sum() <= SWAPPED * swapped.size, "queries"
    # Each swapped token pulls at one sub-key in place of another.
    ratio = SELECTION_VJP_RATIO + float(np.sqrt(np.mean(swapped)))
    equal_or_close(actual["keys"], expected["keys"], ratio=ratio)


def not_transposed(kernel, spec):
    if OLD_JAX:
        return "Mosaic GPU's interpreter in jax 0.10 knows no transposed operand of wgmma"
    return None


GATED_DELTA = Entry(
    op="chunk_gated_delta_rule",
    **compared(gated_delta.COMPARISON),
    differentiable=("query", "key", "value", "log_decay", "beta", "initial_state"),
    kernels=("tpu",),
    ratio=2e-6,
    vjp_ratio=1e-5,
)
# A GPU's products leave out 2^-17. Mosaic GPU's interpreter takes some ten seconds for each spec.
GATED_DELTA_ON_GPU = dataclasses.replace(
    GATED_DELTA,
    specs=tuple(
        dataclasses.replace(spec, small=spec.name in ("one_token", "strong_decay", "wide_keys"))
        for spec in gated_delta.SPECS
    ),
    kernels=("gpu",),
    ratio=3e-5,
    vjp_ratio=1e-4,
    not_interpreted=not_transposed,
)

ENTRIES = (
    Entry(
        op="add_rms_norm",
        **compared(add_rms_norm.COMPARISON),
        kernels=("gpu",),
        differentiable=("x", "branch", "scale"),
    ),
    GATED_DELTA,
    GATED_DELTA_ON_GPU,
    Entry(
        op="cross_entropy",
        **compared(cross_entropy.COMPARISON) | {"call": both_dtypes_of_losses},
        kernels=("gpu",),
        differentiable=(),
        compare=compare_losses,
        vjp_has_kernels=False,
    ),
    Entry(
        op="embed",
        **compared(embed.COMPARISON),
        kernels=("gpu",),
        differentiable=("table",),
        # A sum of few of the cotangents, whose cosines two programs round differently.
        vjp_ratio=1e-4,
        outputs_have_kernels=False,
    ),
    Entry(
        op="mix_rms_norm",
        **compared(mix_rms_norm.COMPARISON),
        kernels=("gpu",),
        differentiable=("x", "y", "gate"),
    ),
    Entry(
        op="product_top_k",
        specs=product_top_k.SPECS,
        sample=product_top_k.sample,
        call=selection,
        differentiable=("queries", "keys"),
        not_interpreted=interpreted_only(
            tpu=("one_token", "63_tokens", "two_tiles", "top_32", "odd_sizes", "ties"),
            # jax 0.10's XLA takes 12 seconds to compile the 119 pairs of the merge for a CPU.
            gpu=("63_tokens", "two_tiles", "ties", *(() if OLD_JAX else ("top_32",))),
        ),
        compare=compare_selections,
        compare_cotangents=compare_selections_cotangents,
        vjp_has_kernels=False,
    ),
    Entry(
        op="short_convolution",
        **compared(short_convolution.COMPARISON),
        differentiable=("x", "before", "weight"),
        kernels=("gpu",),
        ratio=1e-6,
        vjp_ratio=2e-6,
    ),
    Entry(
        op="slot_add",
        **compared(slot_add.COMPARISON),
        differentiable=("values", "coefficients", "rows"),
        ratio=2e-6,
        vjp_has_kernels=False,
        not_interpreted=interpreted_only(
            tpu=("one_reference", "63_tokens", "distinct", "many_tiles"),
            gpu=("one_token", "63_tokens", "three_slots", "one_slot"),
        ),
    ),
    Entry(
        op="slot_dot",
        **compared(slot_read.DOTS),
        differentiable=("values", "vectors"),
        ratio=2e-6,
        vjp_has_kernels=False,
        not_interpreted=interpreted_only(
            tpu=("one_reference", "63_tokens", "many_places", "many_tiles"),
            gpu=("63_tokens",),
        ),
    ),
    Entry(
        op="slot_read",
        **compared(slot_read.READS) | {"call": read},
        differentiable=("values", "weights", "target", "write_weight"),
        ratio=2e-6,
        vjp_has_kernels=False,
        not_interpreted=interpreted_only(
            tpu=("one_token", "63_tokens", "100_tokens", "many_places", "many_tiles"),
            gpu=("one_token",),
        ),
    ),
)
"""The operations; the gated delta rule twice, because its GPU kernels agree less closely."""
