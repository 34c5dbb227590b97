"""Every option of the programs that read compiled code, at the smallest sizes."""

import json
import os

import pytest

from benchmarks.compiled import launches
from benchmarks.speed import models
from tests.benchmarks.programs import result, run, run_apart

pytestmark = pytest.mark.thorough

FLAGS = os.environ.get("XLA_FLAGS", "")


def test_memory_of_a_step_that_is_compiled_here(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out = tmp_path / "step.json"
    options = (
        *("--device", "cpu", "--models", "fa__fwpkm2_6_10", "--layers", 3, "--batch", 1),
        *("--length", 64, "--loss-block", 64, "--size", "tiny", "--compile", "--out", out),
    )
    run("compiled.step_memory", *options)
    (row,) = result(out)["rows"]
    assert 0 < row["kept_megabytes"] < row["peak_megabytes"]


def test_what_a_step_keeps_needs_no_compiler_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 1)
    out = tmp_path / "step.json"
    options = ("--models", "fa", "fa__remat", "--size", "tiny", "--layers", 1, "--length", 64)
    run("compiled.step_memory", "--device", "v5e", *options, "--no-compile", "--out", out)
    plain, remat = result(out)["rows"]
    assert remat["kept_megabytes"] < plain["kept_megabytes"]
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    names = ("fa__fwpkm2_6_10", "fa__fwpkm2_6_10__frozen")
    options = ("--models", *names, "--size", "tiny", "--layers", 3, "--length", 64)
    run("compiled.step_memory", "--device", "v5e", *options, "--no-compile", "--out", out)
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
    run_apart("compiled.scaling", *options, XLA_FLAGS=flags)
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
    run_apart("compiled.scaling", *options, XLA_FLAGS=flags)
    (row,) = result(out)
    assert set(row["sent_megabytes"]) == {"sequence"}
    by_layer = row["sent_megabytes_by_layer"]
    assert list(by_layer) == ["layer_0", "layer_1", "layer_2", "others"]
    assert by_layer["layer_0"] == by_layer["layer_1"] < by_layer["layer_2"]
    assert sum(by_layer.values()) == pytest.approx(sum(row["sent_megabytes"]["sequence"].values()))
    assert by_layer["others"] < 0.01 * by_layer["layer_0"]


def test_other_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match="data=3 x fsdp=1 x model=1 x sequence=1 is 3"):
        run("compiled.scaling", "--device", "v5e", "--data", 3, "--fsdp", 1)


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
    run("compiled.launches", *options)
    assert len(result(out)["rows"]) >= 4  # Keys and values, forward and backward.
