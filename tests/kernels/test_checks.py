"""The checks before a kernel's first use: right kernels pass, wrong ones are found."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch
from pallas_kernels.add_rms_norm import gpu as add_rms_norm
from pallas_kernels.embed import api as embed
from pallas_kernels.gated_delta import specs as gated_delta_specs
from pallas_kernels.gated_delta import tpu as gated_delta
from pallas_kernels.mix_rms_norm import gpu as mix_rms_norm
from pallas_kernels.product_top_k import specs as product_top_k_specs
from pallas_kernels.short_convolution import gpu as short_convolution
from pallas_kernels.slot_add import specs as slot_add_specs


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [product_top_k_specs.check, slot_add_specs.check_scan, gated_delta_specs.check]
)
def test_right_kernels_pass_at_the_widths_of_the_check(check):
    with dispatch.interpret_kernels("tpu"):
        check("tpu")


def in_output(found):
    (output, *others), saved = found
    return (output.at[0, 0].mul(1.01), *others), saved


WRONG = {
    "add_rms_norm": ("norm_alone", add_rms_norm, "backward", lambda x: (*x[:2], 2 * x[2]), "scale"),
    "mix_rms_norm": ("63_tokens", mix_rms_norm, "backward", lambda x: (*x[:2], 2 * x[2]), "gate"),
    "embed": ("one_often", embed, "_summed", lambda x: x.at[0].mul(2.0), "table"),
    # The label's logit is another one.
    "cross_entropy": ("one_group", jnp, "clip", lambda x: x * 0, r"\[0\]\[0\]"),
    # The cotangents of queries, which are unit vectors.
    "short_convolution": (
        *("packed", short_convolution, "backward"),
        lambda x: (x[0].at[..., :64].mul(1.01), *x[1:]),
        "'x'",
    ),
    "gated_delta": ("one_token", gated_delta, "forward", in_output, "output"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "case"), WRONG.items(), ids=WRONG)
def test_a_wrong_kernel_fails_the_check_before_its_first_use(folder, case, monkeypatch):
    name, module, function, change, found = case
    specs = importlib.import_module(f"pallas_kernels.{folder}.specs")
    comparison = dataclasses.replace(specs.COMPARISON, checked=(name,))
    kernel = "tpu" if folder == "gated_delta" else "gpu"
    right = getattr(module, function)
    with dispatch.interpret_kernels(kernel):
        if folder in ("add_rms_norm", "mix_rms_norm", "embed", "cross_entropy"):
            comparison.check(kernel)
        jax.clear_caches()  # What was traced before is not traced again.
        monkeypatch.setattr(module, function, lambda *x, **how: change(right(*x, **how)))
        with pytest.raises(AssertionError, match=f"{found}.* differs by"):
            comparison.check(kernel)
