"""Every option of the programs that read compiled code, at the smallest sizes."""

import importlib.util
import json
import os

import pytest

from benchmarks.compiled import assembler, gated_delta, launches, tpu_schedule, traffic
from benchmarks.speed import models
from tests.benchmarks.programs import result, run, run_apart

pytestmark = pytest.mark.slow

FLAGS = os.environ.get("XLA_FLAGS", "")


def test_memory_of_a_step_that_is_compiled_here(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out = tmp_path / "step.json"
    options = (
        *("--device", "cpu", "--models", "fa__fwpkm2_6_10", "--layers", 3, "--batch", 1),
        *("--length", 64, "--loss-block", 64, "--size", "tiny", "--compile", "--out", out),
    )
    run("benchmarks.compiled.step_memory", *options)
    (row,) = result(out)["rows"]
    assert 0 < row["kept_megabytes"] < row["peak_megabytes"]


def test_what_a_step_keeps_needs_no_compiler_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 1)
    out = tmp_path / "step.json"
    names = [f"fa{ending}" for ending in ("__remat_offload", "__remat", "__remat_dots", "")]
    options = ("--models", *names, "--size", "tiny", "--layers", 1, "--length", 64)
    run(
        "benchmarks.compiled.step_memory", "--device", "v5e", *options, "--no-compile", "--out", out
    )
    kept = [row["kept_megabytes"] for row in result(out)["rows"]]
    assert sorted(kept) == kept
    assert len(set(kept)) == 4
    with pytest.raises(ValueError, match="all is none of block, names, dots, offload"):
        models.remat_of("fa__remat_all")
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    names = ("fa__fwpkm2_6_10", "fa__fwpkm2_6_10__frozen")
    options = ("--models", *names, "--size", "tiny", "--layers", 3, "--length", 64)
    run(
        "benchmarks.compiled.step_memory", "--device", "v5e", *options, "--no-compile", "--out", out
    )
    full, frozen = result(out)["rows"]
    assert frozen["kept_megabytes"] < 0.9 * full["kept_megabytes"]


def test_a_step_over_devices(tmp_path):
    out = tmp_path / "scaling.json"
    options = (
        *("--device", "cpu", "--size", "tiny", "--data", 2, "--fsdp", 1, "--model", 1),
        *("--memory", "independent", "--sequences", 1, "--length", 64, "--layers", 3),
        *("--name", "fa__fwpkm2_6_10"),
        *("--num-subkeys", 16, "--out", out),
    )
    out.write_text(json.dumps([{"options": {}}]))
    flags = f"{FLAGS} --xla_force_host_platform_device_count=2"
    run_apart("benchmarks.compiled.scaling", *options, XLA_FLAGS=flags)
    other, row = result(out)
    assert other == {"options": {}}
    assert row["slots"] == 256
    assert row["sent_megabytes"]


def test_what_layers_send_for_one_sequence_over_devices(tmp_path):
    out = tmp_path / "scaling.json"
    options = (
        *("--device", "cpu", "--size", "tiny", "--data", 1, "--fsdp", 1, "--sequence", 4),
        *("--memory", "independent", "--sequences", 1, "--length", 256, "--layers", 3),
        *("--work", "read", "--name", "gdn_swa__fwpkm2_6_10", "--num-subkeys", 16, "--out", out),
    )
    flags = f"{FLAGS} --xla_force_host_platform_device_count=4"
    run_apart("benchmarks.compiled.scaling", *options, XLA_FLAGS=flags)
    (row,) = result(out)
    assert set(row["sent_megabytes"]) == {"sequence"}
    by_layer = row["sent_megabytes_by_layer"]
    assert list(by_layer) == ["layer_0", "layer_1", "layer_2", "others"]
    assert by_layer["layer_0"] == by_layer["layer_1"] < by_layer["layer_2"]
    assert sum(by_layer.values()) == pytest.approx(sum(row["sent_megabytes"]["sequence"].values()))
    assert by_layer["others"] < 0.01 * by_layer["layer_0"]


def test_other_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match="data=3 x fsdp=1 x model=1 x sequence=1 is 3"):
        run("benchmarks.compiled.scaling", "--device", "v5e", "--data", 3, "--fsdp", 1)


SAMPLE = """HloModule sample

%kernel.1 (p: f32[8]) -> f32[8] {
  ROOT %call = f32[8]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/while/body/slot_dot/mpmd_map"}
}

%body.2 (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element(%carry), index=1
  %a = f32[8]{0} fusion(%x), kind=kCustom, calls=%kernel.1
  %b = f32[8]{0} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/while/body/slot_add/mpmd_map"}
  %c = f32[8]{0} copy(%b)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %c)
}

ENTRY %main.3 (x: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%start), condition=%cond, body=%body.2
  ROOT %r = f32[8]{0} get-tuple-element(%w), index=1
}
"""  # noqa: E501


def test_launches_are_counted_by_loop(tmp_path):
    (loop,) = launches.loops(SAMPLE)
    assert loop == {
        "loop": "body.2",
        "launches": 3,
        "by_kind": {"fusion": 1, "custom-call": 1, "copy": 1},
        "kernels": {"slot_add": 1, "slot_dot": 1},
    }
    out = tmp_path / "launches.json"
    options = (
        *("--device", "cpu", "--subkeys", 8, "--dim", 8, "--chunk-size", 8, "--batch", 1),
        *("--chunks", 2, "--out", out),
    )
    run("benchmarks.compiled.launches", *options)
    assert len(result(out)["rows"]) >= 4  # Keys and values, forward and backward.
    run("benchmarks.compiled.launches", "--rule", "sdm", *options)
    assert result(out)["options"]["rule"] == "sdm"
    assert len(result(out)["rows"]) >= 2  # Chunks, forward and backward.


TRAFFIC = """HloModule sample

%sliced.1 (p0: f32[4,1024], p1: s32[]) -> f32[1024] {
  %p0 = f32[4,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,1024}
  %flat = f32[1024]{0} bitcast(%slice)
  ROOT %twice = f32[1024]{0} add(%flat, %flat)
}

%stored.2 (p0: f32[4,1024], p1: f32[1,1024], p2: s32[]) -> f32[4,1024] {
  %p0.1 = f32[4,1024]{1,0} parameter(0)
  %p1.1 = f32[1,1024]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %in_place = f32[4,1024]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %p2.1)
}

%product.3 (p0: f32[32,8], p1: f32[8,16]) -> f32[32,16] {
  %p0.2 = f32[32,8]{1,0} parameter(0)
  %p1.2 = f32[8,16]{1,0} parameter(1)
  ROOT %dot = f32[32,16]{1,0} dot(%p0.2, %p1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}, algorithm=dot_bf16_bf16_f32_x3
}

%body.4 (carry: (s32[], f32[4,1024], f32[1,1024], f32[32,8], f32[8,16], f32[99,16], s32[8,2], f32[3,8,2])) -> (s32[]) {
  %i = s32[] get-tuple-element(%carry), index=0
  %many = f32[4,1024]{1,0} get-tuple-element(%carry), index=1
  %one = f32[1,1024]{1,0} get-tuple-element(%carry), index=2
  %left = f32[32,8]{1,0} get-tuple-element(%carry), index=3
  %right = f32[8,16]{1,0} get-tuple-element(%carry), index=4
  %table = f32[99,16]{1,0} get-tuple-element(%carry), index=5
  %ids = s32[8,2]{1,0} get-tuple-element(%carry), index=6
  %weights = f32[3,8,2]{2,1,0} get-tuple-element(%carry), index=7
  %a = f32[1024]{0} fusion(%many, %i), kind=kLoop, calls=%sliced.1
  %b = f32[4,1024]{1,0} fusion(%many, %one, %i), kind=kLoop, calls=%stored.2
  %c = f32[32,16]{1,0} fusion(%left, %right), kind=kCustom, calls=%product.3
  %d = f32[8,16]{1,0} custom-call(%table, %ids, %weights), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/while/body/slot_read/mpmd_map"}
  ROOT %next = (s32[]) tuple(%i)
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %w = (s32[]) while(%start), condition=%cond, body=%body.4, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %copied = f32[8]{0} copy(%x)
}
"""  # noqa: E501


def test_bytes_and_operations_of_each_launch():
    sizes = traffic.Sizes(tokens=8, places=2, value=16, distinct=0.5)
    found = traffic.launches(TRAFFIC, sizes)
    assert found["ENTRY"][0] == 1
    turns, body = found["body.4"]
    assert turns == 3
    product = (32 * 8 + 8 * 16 + 32 * 16) * 4
    rows = 0.5 * 8 * 2 * 16 * 4  # The distinct rows, once.
    assert body == [
        ("a", 4 * 1024 + 4 + 4 * 1024, 0.0),  # The slice, its index, the result.
        ("b", 2 * 4 * 1024 + 4, 0.0),  # The update read and written, not the whole array.
        ("c", product, 3 * 2 * 32 * 16 * 8),
        # Ids, this turn's weights, result, rows; not the table.
        ("slot_read", 8 * 2 * 4 + 8 * 2 * 4 + 8 * 16 * 4 + rows, 0.0),
    ]


def test_a_step_is_modelled_by_bandwidth_products_and_launches(tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "time.json"
    text.write_text(TRAFFIC)
    options = (
        *("--device", "cpu", "--text", text, "--subkeys", 4, "--dim", 16, "--width", 32),
        *("--batch", 1, "--chunk-size", 8, "--chunks", 3, "--memories", 2, "--distinct", 0.5),
        *("--bandwidth-tbs", 2, "--bandwidth-share", 0.5, "--tflops", 4, "--tflops-share", 0.25),
        *("--launch-us", 10, "--backbone-ms", 1.0, "--out", out),
    )
    run("benchmarks.compiled.step_time", *options)
    found = result(out)
    once, loop = found["rows"]
    assert once["loop"] == "once per sequence"
    assert (loop["turns"], loop["launches"]) == (3, 4)
    # 1 byte takes 1e-6 us, 1 operation likewise; the product has more operations than bytes.
    moved = (8196 + 8196 + 64 + 64 + 512 + 2048) / 1e6  # The rows of 8 places.
    assert loop["microseconds"] == pytest.approx(40 + moved + 24576 / 1e6, rel=1e-6)
    projections = 3 * 3 * (10 + 3 * 2 * 8 * 32 * 16 / 1e6)
    memories = 2 * (once["microseconds"] + 3 * loop["microseconds"] + projections) / 1000
    assert found["memories_ms"] == pytest.approx(memories)
    assert found["ratio"]["1.0"] == pytest.approx(1 / (1 + memories))


def test_a_step_is_modelled_from_what_is_compiled_here(tmp_path):
    out = tmp_path / "time.json"
    options = ("--subkeys", 8, "--dim", 8, "--chunk-size", 8, "--batch", 1, "--chunks", 2)
    run("benchmarks.compiled.step_time", "--device", "cpu", *options, "--out", out)
    assert all(row["launches"] > 0 for row in result(out)["rows"])


REPORT = """\
ptxas info    : Function properties for gated_delta_read_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 163 registers, used 1 barriers
"""
PROGRAM = """\
.visible .entry gated_delta_read_mosaic_gpu_kernel(
)
{
\t.reg .pred \t%p<2>;

// %bb.0:
\tmov.u32 \t%r1, %tid.x;
\t@%p1 bra \t$L__BB0_2;
\tbar.sync \t0;
$L__BB0_2:
\tret;
}
"""


def test_the_assemblers_report_and_the_instructions_are_read_by_kernel():
    assert assembler.counted(REPORT, PROGRAM) == {
        "gated_delta_read": {
            "registers": 163,
            "spill_store_bytes": 8,
            "spill_load_bytes": 12,
            "instructions": 4,
            "barriers": 1,
        }
    }
    with pytest.raises(ValueError, match="no kernel's registers in the assembler's report ''"):
        assembler.counted("", PROGRAM)


def test_bytes_of_the_gated_delta_rules_kernels_need_no_compiler(tmp_path):
    out = tmp_path / "kernels.json"
    run("benchmarks.compiled.gated_delta", "--size", "five_chunks", "--no-compile", "--out", out)
    both = result(out)["rows"]
    full, half = both[:7], both[7:]
    assert [row["dtype"] for row in (full[0], half[0])] == ["float32", "bfloat16"]
    assert [row["kernel"] for row in full] == [row["kernel"] for row in half]
    assert full[-1]["kernel"] == "all"
    for one, other in zip(full, half, strict=True):
        assert other["megabytes"] < 0.6 * one["megabytes"]
    assert sum(row["megabytes"] for row in full[:6]) == pytest.approx(full[6]["megabytes"])
    # Queries and keys are read, besides three numbers per token and the memory.
    tokens, heads, width = 320, 2, 64
    assert full[0]["megabytes"] > 4e-6 * 2 * tokens * heads * width
    run(
        "benchmarks.compiled.gated_delta",
        "--size",
        "one_token",
        "--dtypes",
        "bfloat16",
        "--no-compile",
    )
    with pytest.raises(ValueError, match="size='huge' is none of one_token"):
        gated_delta.Options(size="huge")


@pytest.mark.parametrize("library", ["jla", "deltanet_tpu"])
def test_kernels_of_another_package_are_counted_where_it_is_installed(library, tmp_path):
    out = tmp_path / "kernels.json"

    def count():
        if library == "jla":
            rows = ("--dtypes", "bfloat16", "--documents", "--no-compile", "--out", out)
            run("benchmarks.compiled.gated_delta", "--size", "wide", "--backend", "jla", *rows)
        else:
            how = ("--devices", "v6e", "--no-compile", "--out", out)
            run("benchmarks.compiled.tpu_schedule", "--size", "wide", "--backend", library, *how)

    if importlib.util.find_spec(library) is None:
        with pytest.raises(ModuleNotFoundError, match=library):
            count()
        return
    count()
    rows = result(out)["rows"]
    assert {row["backend"] for row in rows} == {library}
    assert all(row["megabytes"] > 0 for row in rows)


def test_float32_is_no_dtype_of_another_packages_gpu_kernels():
    with pytest.raises(ValueError, match="backend=jla takes bfloat16 alone"):
        gated_delta.Options(backend="jla")


SCHEDULE = """== CAPACTIY:
MXU, VLOAD:FILL, VSTORE
    4     3     1
== UTILIZATION:
4 0 0
2 3 1
0 0 1
0 0 0
"""


def test_a_schedule_is_read_by_unit():
    bundles, used = tpu_schedule.schedule(SCHEDULE)
    assert bundles == 4
    assert used == {"MXU": 0.375, "VLOAD:FILL": 0.25, "VSTORE": 0.5}


BUNDLES = """LH: loop header
     0x7   :  { %15 = vsyncpa 0 } /* Start region 9 */
     0x10 LB: > { %s1 = smov 0 } /* Start region 50 :: Start region 51 */
     0x12 LB: >> { %s2 = smov 0 } /* Start region 60 */
     0x14   : >> { %1 = sbr.rel (!%p1) target = $region60 }
     0x18   : >> { %s3 = smov 0 }
     0x20   : > { %2 = sbr.rel (%p2) target = $region51 }
     0x30   :  { %3 = sbr.rel (%p3) target = $region77 }
"""


def test_the_innermost_loops_of_a_kernel_are_found():
    assert tpu_schedule.loops(BUNDLES) == [0x14 + 4 - 0x12 + 1]
    assert tpu_schedule.loops(BUNDLES.replace("$region60", "$region77")) == [0x20 + 4 - 0x10 + 1]
    assert not tpu_schedule.loops(SCHEDULE)


def test_bytes_of_a_tpus_kernels_need_no_compiler(tmp_path):
    out = tmp_path / "kernels.json"
    run(
        "benchmarks.compiled.tpu_schedule",
        *("--size", "paper_widths", "--dtype", "float32", "--devices", "v5e", "v6e"),
        *("--no-compile", "--out", out),
    )
    first, last, *others = result(out)["rows"]
    assert [row["kernel"] for row in (first, last)] == [
        "gated_delta_forward",
        "gated_delta_backward",
    ]
    assert [row["device"] for row in others] == ["v6e", "v6e"]
    chunks, heads, tile = 256 // 64, 8, 64 * 64 * 4 / 1e6
    assert first["programs"] == chunks * 1  # All eight heads are one block.
    # Tokens, memories and inverses without gaps; 0.05 MB of numbers per token and head.
    tokens, memories = 4 * chunks * heads * tile, (chunks + 2) * heads * tile
    assert 0 < first["megabytes"] - tokens - memories - chunks * heads * tile < 0.1
    run(
        "benchmarks.compiled.tpu_schedule",
        *("--op", "slot_add", "--size", "paper", "--no-compile", "--out", out),
    )
    assert {row["kernel"] for row in result(out)["rows"]} == {"slot_add"}
    with pytest.raises(ValueError, match="size='huge' is none of one_token"):
        tpu_schedule.Options(size="huge")
    with pytest.raises(ValueError, match=r"'h100'.* are none of v5e, v5p"):
        tpu_schedule.Options(devices=("h100",))
