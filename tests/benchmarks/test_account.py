"""The account of a compiled training step, and executables made ahead of time."""

import json
import lzma

import pytest

from benchmarks.compiled import account, executables
from benchmarks.compiled.traffic import Instruction
from benchmarks.machine import write_result
from benchmarks.speed import models
from tests.benchmarks.programs import result, run

TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/somewhere/fwpkm_jax/training/step.py"
2 "/somewhere/fwpkm_jax/layers/mlp.py"
3 "/somewhere/fwpkm_jax/layers/norms.py"
4 "/somewhere/fwpkm_jax/layers/mixers/gated_delta_net.py"
5 "/lib/python/site-packages/optax/_src/update.py"
6 "/somewhere/fwpkm_jax/layers/memories/fast_weight.py"

FunctionNames
1 "make_train_step.<locals>.step"
2 "_gradients"
3 "SwiGLU.__call__"
4 "GatedNorm.__call__"
5 "GatedDeltaNet.mix_heads"
6 "apply_updates"
7 "FastWeight.signals"

FileLocations
1 {file_name_id=1 function_name_id=1 line=120 end_line=120 column=23 end_column=80}
2 {file_name_id=1 function_name_id=2 line=180 end_line=180 column=23 end_column=80}
3 {file_name_id=2 function_name_id=3 line=74 end_line=74 column=23 end_column=80}
4 {file_name_id=4 function_name_id=5 line=369 end_line=369 column=23 end_column=80}
5 {file_name_id=3 function_name_id=4 line=66 end_line=66 column=23 end_column=80}
6 {file_name_id=5 function_name_id=6 line=5 end_line=5 column=23 end_column=80}
7 {file_name_id=6 function_name_id=7 line=5 end_line=5 column=23 end_column=80}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=3}
5 {file_location_id=5 parent_frame_id=5}
6 {file_location_id=6 parent_frame_id=2}
7 {file_location_id=7 parent_frame_id=3}

%twice.1 (p0: f32[1000]) -> f32[1000] {
  %p0 = f32[1000]{0} parameter(0)
  ROOT %add = f32[1000]{0} add(%p0, %p0)
}

%body.2 (carry: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %x.1 = f32[1000]{0} get-tuple-element(%carry), index=1
  %kernel = f32[1000]{0} custom-call(%x.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/jvp(layer_0)/gated_delta_walk/mpmd_map" stack_frame_id=4}
  ROOT %t = (s32[], f32[1000]{0}) tuple(%i, %kernel)
}

ENTRY %main.3 (x: f32[1000], w: f32[10,20]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %w = bf16[10,20]{1,0} parameter(1)
  %mlp_fusion = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1, metadata={op_name="jit(step)/jvp(layer_0)/mul" stack_frame_id=3}
  %conv_fusion.1 = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1, metadata={op_name="jit(step)/transpose(jvp(layer_0))/add_any" stack_frame_id=4}
  %norm_fusion = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1, metadata={op_name="jit(step)/jvp(layer_0)/mul" stack_frame_id=5}
  %adam_fusion = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1, metadata={op_name="jit(step)/add" stack_frame_id=6}
  %memory_fusion = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1, metadata={op_name="jit(step)/jvp(layer_0)/mul" stack_frame_id=7}
  %no_place_fusion = f32[1000]{0} fusion(%x), kind=kLoop, calls=%twice.1
  %product = (f32[10,30]{1,0}, s8[33554432]{0}) custom-call(%w, %w2), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/jvp()/dot_general" stack_frame_id=3}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %w2 = bf16[20,30]{1,0} parameter(2)
  %loop = (s32[], f32[1000]{0}) while(%start), condition=%cond, body=%body.2, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %r = f32[1000]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
PASS = 8000 / 1e9  # A fusion reads and writes 1,000 numbers.


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(TEXT)
    return path


def classes(path):
    found = result(path)["models"]["gdn"]
    return {row["class"]: row for row in found["rows"]}, found["total"]


def test_every_launch_has_one_class_with_its_bytes_and_operations(tmp_path, text):
    out, table = tmp_path / "account.json", tmp_path / "account.md"
    options = ("--models", "gdn", "--texts", text, "--launch-us", 2, "--table", table)
    run("benchmarks.compiled.account", *options, "--out", out)
    found, total = classes(out)
    once = (
        *("SwiGLU", "short convolution, SiLU, L2 norm", "gated norm", "optimiser"),
        *("memories: elementwise", account.OTHERS),
    )
    for kind in once:
        assert (found[kind]["launches"], found[kind]["gigabytes"]) == (1, pytest.approx(PASS))
    kernels = found["kernels of the gated delta rule"]
    assert (kernels["launches"], kernels["gigabytes"]) == (3, pytest.approx(3 * PASS))
    product = found[account.PRODUCTS]
    moved = 2 * 10 * 20 + 2 * 20 * 30 + 4 * 10 * 30  # Without the workspace.
    assert product["gigabytes"] == pytest.approx(moved / 1e9)
    assert product["teraflop"] == pytest.approx(2 * 10 * 30 * 20 / 1e12)
    assert found["SwiGLU"]["h100_ms"] == pytest.approx(1e3 * 8000 / account.DEVICES["h100"].copy)
    assert found[account.WAITING]["h200_ms"] == pytest.approx(10 * 2e-3)
    assert total["launches"] == 10
    lines = table.read_text().splitlines()
    assert lines[0] == "| `gdn` | launches | GB | TFLOP | H100, ms | H200, ms |"
    assert len(lines) == 3 + len(found)
    with pytest.raises(SystemExit, match="1 files for 2 models"):
        run("benchmarks.compiled.account", "--models", "gdn", "fa", "--texts", text)


def test_a_profile_is_joined_by_name_and_expected_of_later_code(tmp_path, text):
    kernels = [
        ["mlp_fusion", 1, 0.5],
        ["conv_fusion_1", 1, 0.25],
        ["gated_delta_walk_mosaic_gpu_kernel", 3, 1.0],
        ["nvjet_sm90_tst_128x128", 1, 2.0],
        ["Memset 0", 5, 0.125],
        ["fusion_77", 1, 0.0625],
    ]
    profile, out, later = (tmp_path / x for x in ("profiles.json", "before.json", "later.json"))
    profile.write_text(json.dumps({"gdn/all": kernels}))
    step = {"model": "gdn", "variant": "all", "milliseconds": 5.0, "device": "NVIDIA H200"}
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    options = ("--models", "gdn", "--texts", text)
    run(
        "benchmarks.compiled.account",
        *options,
        "--profile",
        profile,
        "--variant",
        "all",
        "--out",
        out,
    )
    found, total = classes(out)
    measured = {kind: row["measured_ms"] for kind, row in found.items() if row["measured_ms"]}
    assert measured == {
        "SwiGLU": 0.5,
        "short convolution, SiLU, L2 norm": 0.25,
        "kernels of the gated delta rule": 1.0,
        account.PRODUCTS: 2.0,
        "copies, memory set": 0.125,
        account.UNKNOWN: 0.0625,
        account.WAITING: pytest.approx(5 - 3.9375),
    }
    assert total["measured_ms"] == pytest.approx(5)

    # Later code has no such pass in the MLP, and twice the passes around the convolution.
    line = next(x for x in TEXT.splitlines() if "%conv_fusion.1 =" in x)
    changed = TEXT.replace("stack_frame_id=3}\n  %conv", "stack_frame_id=4}\n  %conv")
    assert line in changed != TEXT
    text.write_text(changed)
    table = tmp_path / "later.md"
    run("benchmarks.compiled.account", *options, "--before", out, "--out", later, "--table", table)
    found, total = classes(later)
    assert "SwiGLU" not in found
    conv = found["short convolution, SiLU, L2 norm"]
    assert conv["expected_h200_ms"] == pytest.approx(0.5)
    assert conv["expected_h100_ms"] == pytest.approx(0.5 * 4.1 / 3.0)
    assert found["copies, memory set"]["expected_h100_ms"] == 0.125
    # Launches that the profile did not see take their modelled time.
    assert found["gated norm"]["expected_h200_ms"] == found["gated norm"]["h200_ms"]
    assert total["expected_h200_ms"] == pytest.approx(
        sum(row["expected_h200_ms"] for row in found.values())
    )
    assert "H100 expected, ms" in table.read_text()
    with pytest.raises(SystemExit, match="has no account of fa"):
        run("benchmarks.compiled.account", "--models", "fa", "--texts", text, "--before", out)
    step["device"] = "TPU v5e"
    (tmp_path / "steps.jsonl").write_text(json.dumps(step) + "\n")
    with pytest.raises(SystemExit, match="'TPU v5e'; DEVICES knows h100, h200"):
        run("benchmarks.compiled.account", *options, "--profile", profile)
    (tmp_path / "steps.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"no steps\.jsonl has gdn's step"):
        run("benchmarks.compiled.account", *options, "--profile", profile)


def test_a_profile_of_some_kernels_says_how_much_it_does_not_list(tmp_path, text):
    kernel = {"name": "mlp_fusion", "launches": 1, "milliseconds": 3.0, "share": 0.75}
    row = {"model": "gdn", "milliseconds": 5.0, "longest_kernels": [kernel]}
    write_result({"environment": {"device": "NVIDIA H200"}, "rows": [row]}, tmp_path / "p.json")
    options = ("--models", "gdn", "--texts", text, "--profile", tmp_path / "p.json")
    run("benchmarks.compiled.account", *options, "--out", tmp_path / "out.json")
    found, _ = classes(tmp_path / "out.json")
    assert found[account.UNKNOWN]["measured_ms"] == pytest.approx(1.0)
    assert found[account.WAITING]["measured_ms"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_step_compiled_here_is_accounted_for_by_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out = tmp_path / "account.json"
    options = (
        *("--device", "cpu", "--size", "tiny", "--models", "gdn__fwpkm2_6_10", "--batch", 1),
        *("--length", 64, "--loss-block", 64, "--chunk-size", 64, "--width", 64),
        *("--places", 8, "--distinct", 0.5, "--no-triton"),
    )
    run("benchmarks.compiled.account", *options, "--keep-texts", tmp_path, "--out", out)
    found = result(out)["models"]["gdn__fwpkm2_6_10"]
    kinds = {row["class"] for row in found["rows"]}
    assert {"SwiGLU", "optimiser", "memories: elementwise", "gated norm"} <= kinds
    assert (tmp_path / "gdn__fwpkm2_6_10.hlo").read_text().startswith("HloModule jit_step")
    assert found["total"]["launches"] > 100
    with pytest.raises(SystemExit, match="the file has no bytes of a topology"):
        run("benchmarks.compiled.account", *options, "--topology", tmp_path / "none.json")


@pytest.mark.slow
def test_an_executable_takes_the_steps_that_the_compiled_one_takes(tmp_path, monkeypatch):
    import jax
    import numpy as np

    from benchmarks.speed import train_step

    monkeypatch.setattr(models, "TINY_LAYERS", 1)
    options = (
        *("--device", "cpu", "--size", "tiny", "--batch", 1, "--length", 32),
        *("--loss-block", 32, "--models", "gdn", "--no-triton", "--out", tmp_path),
    )
    run("benchmarks.compiled.executables", *options)
    compiled, facts = executables.load(tmp_path / "gdn.exe.xz")
    assert (facts["model"], facts["jax"]) == ("gdn", jax.__version__)
    assert facts["planned"]["argument"] > 0
    step, make_state = train_step.make_step(32, "gdn", models.model_of("gdn", "tiny"))
    sizes = train_step.Options(batch=1, length=32)
    batch = train_step.random_batch(sizes, models.model_of("gdn", "tiny"))
    _, expected = step(jax.jit(make_state)(), batch)
    state, found = compiled(jax.jit(make_state)(), batch)
    np.testing.assert_array_equal(found["loss"], expected["loss"])
    compiled(state, batch)  # Its own result is an argument again.
    damaged = tmp_path / "gdn.exe.xz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(lzma.LZMAError):
        executables.load(damaged)
    with pytest.raises(SystemExit, match="the file has no bytes of a topology"):
        run("benchmarks.compiled.executables", *options, "--topology", tmp_path / "none.json")
    with pytest.raises(ValueError, match="gdm"):
        run(
            "benchmarks.compiled.executables",
            "--device",
            "cpu",
            "--models",
            "gdm",
            "--out",
            tmp_path,
        )


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("optimizer.py:global_norm < step.py:_update < step.py:step", "optimiser"),
        ("optimizer.py:_clip.<locals>.update < step.py:step", "optimiser"),
        ("micro_batches.py:deal_batch < step.py:_gradients < step.py:step", account.OTHERS),
    ],
)
def test_norms_and_clipping_belong_to_the_optimiser_and_gradients_do_not(where, kind):
    one = Instruction(False, "fusion", "f32[]", "fusion", "")
    where = " < ".join(f"fwpkm_jax/training/{place}" for place in where.split(" < "))
    assert account.class_of("fusion", one, where, is_product=False) == kind


def test_a_kernel_of_the_memories_that_adds_an_embeddings_gradient_up_is_not_theirs():
    one = Instruction(False, "mpmd_map.1", "f32[]", "custom-call", "")
    kernel = "pallas_kernels/slot_add/gpu.py:add"
    kinds = [
        account.class_of("slot_add", one, f"{kernel} < {by}", is_product=False)
        for by in (
            "fwpkm_jax/core/slots/values/scan.py:body",
            "pallas_kernels/embed/api.py:_summed",
        )
    ]
    assert kinds == ["memories: kernels", account.OTHERS]
