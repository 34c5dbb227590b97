"""Every option of the programs that time layers, streams and steps, at the smallest sizes."""

import functools
import json
import os
import tempfile
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.row_times import RowSize, slot_stream
from benchmarks.machine import planned_megabytes
from benchmarks.speed import memory, models, restart, train_step
from benchmarks.speed.layer import uniform_memory
from fwpkm_jax.core.chunks import scan_chunks
from fwpkm_jax.rules import FwMLP, FwPKM, FwPKMMemory
from tests.benchmarks.programs import result, run, run_apart

pytestmark = pytest.mark.slow


@functools.partial(jax.jit, static_argnums=(0, 1))
def by_definition(rule, chunk_size, start, arrays):
    """Output, written memory and gradients by the scan of steps and automatic differentiation."""

    def loss(query, value, gate):
        sequence = rule.sequence(query[:, :, None], value, gate=gate, chunk_size=chunk_size)
        written, output, *_ = scan_chunks(rule.step, start, sequence, chunk_size=chunk_size)
        return jnp.sum(output * arrays["cotangent"]), (output, written)

    inputs = [arrays[name] for name in ("query", "value", "gate")]
    gradients, (output, written) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return output, written, gradients


def stand_in(task: dict[str, Any], *, error: float = 0.0) -> dict[str, Any]:
    """Answers as `peer_memory.py` does, by FwPKM's definition and automatic differentiation."""
    assert task["peer"] == "CHECKOUT"
    if task["pass"] != "agree":
        return {"seconds": 1.0, "spread": 0.0, "peak_megabytes": 1.0, "peak_device_megabytes": None}
    arrays = {name: jnp.asarray(x) for name, x in np.load(task["arrays"]).items()}
    widths = {"key_dim": task["dim"], "value_dim": task["dim"]}
    rule = FwPKM(num_subkeys=task["subkeys"], top_k=task["top_k"], **widths)
    start = FwPKMMemory(arrays["keys"], arrays["values"])
    output, written, gradients = by_definition(rule, task["chunk_size"], start, arrays)
    names = ("output", "keys", "values", "d_query", "d_value", "d_gate")
    results = (output * (1 + error), written.keys, written.values, *gradients)
    np.savez(task["results"], **dict(zip(names, map(np.asarray, results), strict=True)))
    return {}


def test_the_memory_alone_and_beside_a_peer(tmp_path):
    out = tmp_path / "memory.json"
    options = (
        *("--subkeys", 8, "--dim", 16, "--top-k", 2, "--chunk-size", 64, "--length", 128),
        *("--backward-length", 64, "--batch", 1, "--repeats", 1, "--passes", "forward", "train"),
        *("--allocators", "default", "--peer", "CHECKOUT", "--peer-python", "python"),
        *("--peer-subkeys", 8, "--out", out),
    )
    run("benchmarks.speed.memory", *options, peer=stand_in)
    written = result(out)
    assert set(written["relative_difference"]) == {
        *("output", "keys", "values", "d_query", "d_value", "d_gate")
    }
    assert max(written["relative_difference"].values()) < 1e-4
    kinds = [(row["memory"], row["pass"], row["subkeys"]) for row in written["rows"]]
    assert kinds == [
        (name, which, subkeys)
        for which in ("forward", "train")
        for name, subkeys in (("fwpkm_jax", 8), ("authors", 8))
    ]
    assert all(row["table_copies"] == 0 for row in written["rows"] if row["memory"] == "fwpkm_jax")
    assert all(ratio["times_faster"] > 0 for ratio in written["ratios"])


def test_a_peer_that_differs_is_seen():
    options = memory.Options(dim=16, top_k=2, peer=Path("CHECKOUT"))
    with pytest.MonkeyPatch.context() as patch:

        def differing(command, **_):
            return stand_in(json.loads(command[-1]), error=0.5)

        patch.setattr(memory.processes, "run_json", differing)
        difference = memory.disagreement(options)
        patch.setattr(memory.processes, "run_json", lambda *_, **__: {"failed": "exit code 1"})
        failed = memory.disagreement(options)
    assert difference["output"] == pytest.approx(1 / 3, rel=1e-3)
    assert difference["d_query"] < 1e-4
    assert failed == {"failed": "exit code 1"}


def test_a_layer_alone_and_beside_titans(tmp_path):
    out = tmp_path / "layer.json"
    options = (
        *("--subkeys", 8, "--model-dim", 16, "--dim", 16, "--chunk-size", 32, "--length", 64),
        *("--backward-length", 32, "--batch", 1, "--repeats", 1, "--passes", "forward", "train"),
        *("--rules", "fwpkm", "sdm"),
        *("--peer-titans", "python", "--peer-chunks", 16, "--out", out),
    )
    tasks = []
    run(
        "benchmarks.speed.layer",
        *options,
        peer=lambda task: tasks.append(task) or {"ms_per_token": 1.0},
    )
    rows = result(out)["rows"]
    assert [(row["pass"], row.get("rule", "peer")) for row in rows] == [
        (which, name) for which in ("forward", "train") for name in ("fwpkm", "sdm", "peer")
    ]
    assert all(row["ms_per_token"] > 0 for row in rows)
    assert [task["tokens"] for task in tasks] == [64, 32]


def test_decoding_here_and_in_pytorch(tmp_path):
    out, tasks = tmp_path / "in_pytorch.json", []

    def answered(task):
        assert (Path(task["folder"]) / "modeling_fwpkm.py").exists()
        tasks.append(task)
        return {
            "seconds": {"with memories": [[3.0, 1.0], [5.0, 2.2]], "base": [[1.0, 1.0]] * 2},
            "versions": {},
        }

    sizes = ("--layers", 2, "--width", 64, "--vocab", 32, "--chunks", 1, "--block", 64)
    peer = ("--peer-python", "python", "--threads", 1, "--out", out)
    run("benchmarks.speed.in_pytorch", *sizes, *peer, peer=answered)
    rows = {(row["program"], row["model"]): row for row in result(out)["rows"]}
    assert rows["PyTorch", "with memories"]["ms_per_token"] == pytest.approx(62.5)
    assert rows["PyTorch", "with memories"]["processor_ms_per_token"] == pytest.approx(25.0)
    assert rows["fwpkm_jax", "base"]["ms_per_token"] > 0
    assert (tasks[0]["blocks"], tasks[0]["threads"]) == (2, 1)


def test_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out = tmp_path / "decode.json"
    options = ("--size", "tiny", "--models", "fa", "fa__fwpkm2_6_10", "--chunks", 1, "--prompt", 8)
    run("benchmarks.speed.decode", *options, "--block", 16, "--dtype", "float32", "--out", out)
    plain, fwpkm = result(out)["rows"]
    assert plain["prompt_ms_per_token"] > 0
    assert plain["processor_ms_per_token"] > 0
    assert plain["prompt_processor_ms_per_token"] > 0
    assert plain["ms_per_token_speed_relative_to_backbone"] == 1.0
    assert fwpkm["parameters"] > plain["parameters"]
    assert fwpkm["table_copies"] == 0


def test_matrix_memories(tmp_path):
    out = tmp_path / "mixers.json"
    options = (
        *("--rules", "deltanet", "--passes", "forward", "--length", 64, "--heads", 1),
        *("--width", 8, "--repeats", 1, "--memory-lengths", 64, "--out", out),
    )
    run("benchmarks.speed.mixers", *options)
    written = result(out)
    assert [row["rule"] for row in written["rows"]] == ["gated_deltanet", "deltanet"]
    assert written["temporary_megabytes"]["deltanet"]["64"] > 0


def test_rows_of_documents(tmp_path):
    out = tmp_path / "documents.json"
    options = (
        "--mixers",
        "swa",
        "--passes",
        "forward",
        "--length",
        64,
        "--documents",
        3,
        "--persistent",
        1,
    )
    run(
        "benchmarks.speed.documents",
        *options,
        "--heads",
        1,
        "--window",
        8,
        "--repeats",
        1,
        "--out",
        out,
    )
    (row,) = result(out)["rows"]
    assert row["mixer"] == "swa"
    assert row["relative"] > 0


@pytest.mark.parametrize("runs", [True, False])
def test_a_long_text_is_read_or_planned(tmp_path, runs):
    out = tmp_path / "long.json"
    config = Path(__file__).parents[1] / "training" / "tiny_config.py"
    options = ("--config", config, "--tokens", 64, "--piece-length", 16, "--dtype", "float32")
    run("benchmarks.speed.long_reading", *options, "--run" if runs else "--no-run", "--out", out)
    assert (result(out)["parts"] is not None) == runs


def test_a_chunk_of_sparse_delta_memory_is_timed_beside_its_parts(tmp_path):
    out = tmp_path / "sparse.json"
    sizes = ("--slots", 64, 256, "--value", 4, "--tokens", 8, "--places", 4, "--chunks", 2)
    run("benchmarks.speed.sparse_delta", *sizes, "--repeats", 1, "--out", out)
    small, large = result(out)["rows"]
    assert (small["slots"], large["slots"]) == (64, 256)
    times = small["processor_milliseconds"]
    counted = sum(time for name, time in times.items() if name not in ("sort", "chunk"))
    assert small["of_parts_processor"] == pytest.approx(times["chunk"] / counted, abs=2e-3)


def test_training_steps_are_timed_and_record_slots(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out, slots = tmp_path / "steps.json", tmp_path / "new" / "slots.npz"
    options = (
        *("--models", "fa__fwpkm2_6_10__frozen__remat", "fa__fwpkm2_6_10"),
        *("--size", "tiny", "--batch", 1, "--length", 64),
        *("--repeats", 1, "--loss-block", 64, "--record", slots, "--profile", 3, "--out", out),
    )
    assert run("benchmarks.speed.train_step", *options) == 0
    assert result(out)["environment"]["xla_flags"] == os.environ["XLA_FLAGS"]
    row, full = result(out)["rows"]
    assert len(row["seconds"]) == 1
    assert row["argument_megabytes"] < 0.6 * full["argument_megabytes"]  # No moments.
    assert {one["implementation"] for one in row["implementations"]} == {"reference"}
    longest = row["longest_kernels"]
    assert len(longest) == 3
    assert longest == sorted(longest, key=lambda kernel: -kernel["milliseconds"])
    assert all(0 < kernel["share"] < 1 <= kernel["launches"] for kernel in longest)
    with np.load(slots) as file:
        assert file["slot_ids"].shape == (64, 8)
    for size in (RowSize(calls=3), RowSize(value=128, places=32, tokens=16, calls=2, slots=64)):
        slot_ids = slot_stream(size, "recorded", slots)
        assert slot_ids.shape == (size.calls, size.tokens, size.places)
        assert 0 <= slot_ids.min() <= slot_ids.max() < size.slots


def test_a_fallback_fails_where_kernels_are_required(tmp_path, monkeypatch, capsys):
    fallen = {"op": "slot_read", "implementation": "reference", "reason": "no kernels for cpu"}
    forced = {**fallen, "op": "slot_add", "reason": "by PALLAS_KERNELS_REFERENCE"}
    chosen = {"op": "gated_delta", "implementation": "gpu", "reason": "chosen"}
    turn = {"seconds": [1.0], "tokens": 64, "implementations": [fallen, forced, chosen]}
    monkeypatch.setattr(train_step, "measure", lambda options, name: turn)
    assert run("benchmarks.speed.train_step", "--models", "gdn", "--require-kernels") == 1
    printed = capsys.readouterr().err
    assert "gdn: slot_read ran as plain JAX (no kernels for cpu)\n" in printed
    assert "gdn: slot_add ran" not in printed
    with pytest.raises(SystemExit, match=r"none of the models .* has a memory layer"):
        run("benchmarks.speed.train_step", "--models", "gdn", "--record", tmp_path / "slots.npz")


def test_a_turn_that_dies_leaves_the_others_and_each_is_saved(tmp_path, monkeypatch, capsys):
    def measure(options, name):
        return {"failed": "exit code -11"} if name == "gdn__pkm2_6_10" else {
            "seconds": [1.0, 3.0], "tokens": 64}  # fmt: skip

    monkeypatch.setattr(train_step, "measure", measure)
    out = tmp_path / "steps.json"
    names = ("gdn__pkm2_6_10", "gdn", "gdn__fwpkm2_6_10")
    written = []
    monkeypatch.setattr(train_step, "write_result", lambda x, _: written.append(json.dumps(x)))
    options = ("--models", *names, "--batch", 4, "--rounds", 2, "--limit-s", 60, "--out", out)
    assert run("benchmarks.speed.train_step", *options) == 1
    turns = [json.loads(x)["rows"] for x in written]
    assert [len(rows) for rows in turns] == [1, 2, 3, 3, 3, 3]
    dead, plain, fwpkm = turns[-1]
    assert dead == {"model": "gdn__pkm2_6_10", "failed": 2 * ["exit code -11"]}
    assert plain["seconds"] == [1.0, 3.0, 1.0, 3.0]
    assert fwpkm["speed_relative_to_backbone"] == 1.0
    assert plain["samples_per_second"] == fwpkm["samples_per_second"] == 2.0
    assert "gdn__pkm2_6_10: exit code -11" in capsys.readouterr().err


def test_the_models_are_the_papers():
    model = train_step.model_of("gdn__fwpkm2_6_10", "paper")
    assert (model.mixers, model.memory_layers) == (("gdn",) * 12, (2, 6, 10))
    assert train_step.model_of("gdn__pkm2_6_10", "tiny").pkm_layers == (2,)
    with pytest.raises(ValueError, match="none of the paper's models"):
        run("benchmarks.speed.train_step", "--models", "gdn_pkm")


def test_reading_of_long_texts(tmp_path):
    out = tmp_path / "reading.json"
    options = ("--size", "tiny", "--model", "gdn_swa", "--tokens", 40, "--piece", 8)
    run("benchmarks.speed.reading", *options, "--sections", 2, "--out", out)
    found = json.loads(out.read_text())
    assert [row["tokens"] for row in found["rows"]] == [24, 40]
    assert all(row["finite"] for row in found["rows"])


def test_what_a_benchmark_cannot_measure_is_an_error():
    with pytest.raises(ValueError, match="rule=FwMLP: only FwPKM's memory is filled here"):
        uniform_memory(FwMLP(key_dim=8, value_dim=8, hidden_dim=8))
    silent = types.SimpleNamespace(memory_analysis=lambda: None)
    with pytest.raises(ValueError, match="gives no account of memory"):
        planned_megabytes(silent)


@pytest.mark.slow
@pytest.mark.two_phase
def test_overlays_and_private_tables_take_turns(tmp_path):
    out = tmp_path / "users.json"
    run(
        "benchmarks.speed.users",
        *("--users", 1, 2, "--rows", 0, 3, 60, "--subkeys", 8, "--dim", 4),
        *("--top-k", 2, "--chunk-size", 4, "--repeats", 1, "--out", out),
    )
    found = result(out)
    capacities = [row["capacity"] for row in found["rows"]]
    assert capacities == 2 * [None, 16, 19, 64]
    assert [row["users"] for row in found["rows"]] == 4 * [1] + 4 * [2]
    assert all(row["microseconds_per_token"] > 0 for row in found["rows"])
    # A table of 64 rows, keys of 2 x 8 x 2.
    assert found["rows"][0]["kilobytes_per_user"] == (64 * 16 + 128) / 1e3
    assert found["crossovers"]["rows_where_private_is_smaller"] == 42
    assert set(found["crossovers"]["rows_measured_where_private_is_faster"]) == {"1", "2"}


def test_users_at_once_and_one_by_one_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "TINY_LAYERS", 3)
    out = tmp_path / "users.json"
    options = ("--batch-slots", 3, "--users", 1, 3, "--tokens", 4, "--at-a-time", 2, "--rounds", 2)
    small = ("--model", "gdn_swa__fwpkm2_6_10", "--size", "tiny", "--layers", 3, "--aligned")
    run("benchmarks.speed.continuous_batching", *small, *options, "--capacity", 1024, "--out", out)
    rows = result(out)["rows"]
    assert [row["users"] for row in rows] == [1, 3]
    for row in rows:
        low, high = row["times_quartiles"]
        assert 0 < low <= row["times"] <= high
        assert row["at_once_tokens_per_s"] > 0
        assert row["one_by_one_tokens_per_s"] > 0
        assert row["times_of_cpu_time"] > 0
    with pytest.raises(ValueError, match="tokens=5 is no multiple of at_a_time=2"):
        run("benchmarks.speed.continuous_batching", "--tokens", 5, "--at-a-time", 2)


@pytest.mark.slow
def test_a_folder_is_imported_onto_one_and_two_devices(tmp_path):
    out = tmp_path / "imported.json"
    sizes = ("--layers", 4, "--width", 64, "--vocab", 300)
    run_apart("benchmarks.speed.import_folder", *sizes, "--devices", 1, 2, "--out", out)
    rows = result(out)["rows"]
    assert [(row["devices"], row["step"]) for row in rows] == [
        (devices, step) for devices in (1, 2) for step in ("read", "import")
    ]
    assert all(0 < row["peak_megabytes"] < 500 and row["seconds"] > 0 for row in rows)


def test_a_fork_takes_less_than_the_slots_it_wrote(tmp_path):
    out = tmp_path / "saved.json"
    sizes = ("--subkeys", 24, "--width", 16, "--written", 5)
    run("benchmarks.speed.saved_memory", *sizes, "--out", out)
    whole, fork, written, again, loaded = [row["bytes"] for row in result(out)["rows"]]
    assert again == loaded
    assert abs(fork - again) < 100
    assert fork + 5 * 16 * 4 < written < whole - 500 * 16 * 4


def test_a_command_is_timed_from_its_start_to_its_first_line_and_its_end(tmp_path):
    found = restart.timed(["--version"], first="0.", cache=tmp_path)
    assert 0 < found["first_seconds"] <= found["seconds"]
    assert 0 < found["processor_seconds"] < 60
    with pytest.raises(RuntimeError, match=r"fwpkm --version: printed no line with 'step'"):
        restart.timed(["--version"], first="step", cache=tmp_path)
    with pytest.raises(RuntimeError, match=r"fwpkm generate nowhere: exit code 2: .*nowhere"):
        restart.timed(["generate", "nowhere"], first="", cache=tmp_path)


def test_a_command_starts_without_compiled_programs_and_then_finds_its_own(tmp_path, monkeypatch):
    calls: list[tuple[str, Path]] = []

    def timed(arguments, *, first, cache):
        del first
        calls.append((" ".join(arguments), cache))
        turns = sum(cache == one for _, one in calls)
        return dict.fromkeys(("first_seconds", "seconds", "processor_seconds"), 10.0 / turns)

    monkeypatch.setattr(restart, "timed", timed)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda: nullcontext(str(tmp_path)))
    out = tmp_path / "restart.json"
    options = ("--config", "books_tiny", "--overrides", "data.length=64", "--new-tokens", 1)
    run("benchmarks.speed.restart", *options, "--repeats", 2, "--out", out)
    rows = result(out)["rows"]
    assert [row["seconds"] for row in rows] == [10.0, 10.0 / 3] * 3
    trained, asked = [line for line, _ in calls[:3]], [line for line, _ in calls[3:]]
    assert all("--training.steps 1 --data.length 64 --run-dir" in line for line in trained)
    assert len(set(trained)) == 3  # A step of a new run each time, not the end of the same one.
    assert all(line.startswith(f"generate {tmp_path / 'run'} ") for line in asked)
    assert [("--memory reader" in line) for line in asked] == [False] * 3 + [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_text_that_is_read_while_training_in_bounded_memory(tokens, tmp_path):
    pytest.importorskip("pyarrow")
    out = tmp_path / "streaming.json"
    sizes = ("--gigabytes", 0.001, "--files", 3, "--batch-size", 8, "--length", 64, "--window", 16)
    job = ("--job", "read", "--reading", "stream", "--limit-s", 600, "--tokens", tokens)
    lines = tmp_path / "lines.jsonl"
    run_apart("benchmarks.speed.streaming", *sizes, *job, "--out", out, "--lines", lines)
    found = json.loads(out.read_text())
    assert 0.9e6 < found["bytes"] < 1.1e6
    last = json.loads(lines.read_text().splitlines()[-1])
    assert (last["bytes"], last["steps"]) == (found["bytes"], found["steps"])
    assert found["steps"] > 10
    assert last["highest_megabytes"] == pytest.approx(found["peak_megabytes"], abs=0.1)
    assert found["libraries_megabytes"] < found["peak_megabytes"] < 4000
