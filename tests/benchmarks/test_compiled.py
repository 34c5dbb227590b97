"""Every option of the programs that read compiled code, at the smallest sizes."""

import json
import os

import pytest

from benchmarks.speed import models
from tests.benchmarks.programs import result, run, run_apart

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


def test_other_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match="data=3 x fsdp=1 x model=1 is 3 devices"):
        run("compiled.scaling", "--device", "v5e", "--data", 3, "--fsdp", 1)
