"""The compiler for TPUs writes the schedules of kernels that are compiled for them."""

import pytest

from tests.aot.devices import absent_device
from tests.benchmarks.programs import result, run_apart


@pytest.mark.aot
def test_the_gated_delta_rules_kernels_have_a_schedule_for_a_tpu(tmp_path):
    absent_device("v5e")  # Skips where its compiler is not installed.

    def rows(dtype):
        out = tmp_path / f"{dtype}.json"
        options = ("--size", "paper_widths", "--devices", "v5e", "--dtype", dtype, "--out", out)
        run_apart("benchmarks.compiled.tpu_schedule", *options, JAX_PLATFORMS="cpu")
        return result(out)["rows"]

    *wide, together = rows("float32")
    *narrow, _ = rows("bfloat16")
    for row in (*wide, *narrow):
        assert row["million_cycles"] == row["programs"] * row["bundles"] / 1e6
    for row in wide:
        # The unit for products is the busiest: heads side by side fill it.
        assert max(row["used"], key=row["used"].get) == "MXU"
        assert row["used"]["MXU"] > 0.8
    # A product of operands that are rounded to bfloat16 is one pass through it in place of six.
    cycles = [sum(row["million_cycles"] for row in kernels) for kernels in (narrow, wide)]
    assert cycles[0] < 0.6 * cycles[1]
    assert together["temporary"] >= 0


@pytest.mark.aot
def test_a_kernel_with_loops_has_the_bundles_of_the_innermost(tmp_path):
    absent_device("v5e")
    out = tmp_path / "kernels.json"
    options = ("--op", "slot_add", "--size", "chunk", "--devices", "v5e", "--out", out)
    run_apart("benchmarks.compiled.tpu_schedule", *options, JAX_PLATFORMS="cpu")
    kernel, _ = result(out)["rows"]
    # Eight rows at a time are copied in, summed and copied back, then those that are left over.
    assert len(kernel["loops"]) > 4
    assert all(0 < loop < kernel["bundles"] / 4 for loop in kernel["loops"])
