"""Every option of the programs that time and check single operations."""

import json

import numpy as np
import pytest

from benchmarks.kernels import gated_delta, rows, selection
from benchmarks.kernels.row_times import RowSize, slot_stream
from tests.benchmarks.programs import result, run

pytestmark = pytest.mark.slow


@pytest.fixture
def slots(tmp_path):
    """A recording for another table and another number of places than the tiny size has."""
    path = tmp_path / "slots.npz"
    np.savez(path, slot_ids=np.random.default_rng(0).integers(4096, size=(10, 8)))
    return path


def test_operations_on_rows(tmp_path, slots, monkeypatch):
    out, lengths = tmp_path / "rows.json", []

    def write_result(report, path):
        lengths.append(len(report["results"]))
        path.write_text(json.dumps(report))

    monkeypatch.setattr(rows, "write_result", write_result)
    monkeypatch.setattr(rows, "copy_bandwidth", lambda num_bytes: 1e9)
    options = ("--ops", "dot", "group", "--size", "tiny", "--backends", "pallas", "reference")
    run("benchmarks.kernels.rows", *options, "--stream", slots, "--repeats", 1, "--out", out)
    measured = result(out)["results"]
    assert lengths == [*range(1, 7), 6, *range(7, 10), 9]  # After each case, and each operation.
    assert [row["stream"] for row in measured[:6:2]] == ["random", "zipf", "recorded"]
    recorded = [row for row in measured if row["stream"] == "recorded"]
    assert [row["backend"] for row in recorded] == ["pallas", "reference", "xla"]
    # Two calls of 16 tokens with 4 places out of 80 slots of a larger table.
    assert all(row["recording_repeated"] == 128 / 80 for row in recorded)
    assert all(row["recording_folded"] for row in recorded)
    assert all(row["of_copy"] > 0 for row in measured)


def test_a_recording_keeps_its_order_and_is_repeated(slots):
    with np.load(slots) as file:
        flat = file["slot_ids"].reshape(-1)
    size = RowSize(slots=4096, tokens=3, places=16, calls=2)
    drawn = slot_stream(size, "recorded", slots).reshape(-1)
    np.testing.assert_array_equal(drawn, np.concatenate([flat, flat[:16]]))
    with pytest.raises(ValueError, match="name it with --stream"):
        slot_stream(size, "recorded", None)
    np.savez(slots, slot_ids=np.zeros((0, 8), np.int32))
    with pytest.raises(ValueError, match="slot_ids is empty"):
        slot_stream(size, "recorded", slots)


def test_an_unknown_operation_is_refused():
    with pytest.raises(SystemExit, match="No such operation"):
        run("benchmarks.kernels.rows", "--ops", "reed")


def test_the_gated_delta_rule_alone_and_beside_a_peer(tmp_path, monkeypatch):
    small = gated_delta.GatedDeltaSpec(name="tiny", length=64, heads=1, key=16, value=16)
    monkeypatch.setattr(gated_delta, "TINY", small)
    out = tmp_path / "gated_delta.json"
    options = (
        *("--shapes", "tiny", "--passes", "forward", "train", "--backends", "reference"),
        *("--dtypes", "bfloat16", "--repeats", 2, "--block-s", 0.001, "--limit-s", 60),
        *("--peer-fla", "python", "--out", out),
    )
    run(
        "benchmarks.kernels.gated_delta",
        *options,
        peer=lambda task: {"seconds": 2.0, "blocks": task},
    )
    written = result(out)["rows"]
    assert [(row["passes"], row["backend"]) for row in written] == [
        *(("forward", "reference"), ("forward", "fla"), ("train", "reference"), ("train", "fla"))
    ]
    for ours, peer in (written[:2], written[2:]):
        assert len(ours["blocks"]) == len(peer["blocks"]) == 2
        assert peer["seconds"] == 2.0 > ours["seconds"] == 2.0 * ours["time_of_peer"]
        assert ours["relative_spread"] == pytest.approx(ours["spread"] / ours["seconds"])
        assert ours["share_of_matmul"] > 0
    run("benchmarks.kernels.gated_delta", *options, "--prepare", peer=lambda task: {})
    assert result(out)["rows"] == [
        {"shape": "tiny", "prepared": [["reference", "bfloat16"], ["fla", "bfloat16"]]}
    ]
    run("benchmarks.kernels.gated_delta", *options, peer=lambda task: {"failed": "no torch"})
    written = result(out)["rows"]
    assert [row.get("failed") for row in written] == [None, "no torch"] * 2
    assert all(row["seconds"] > 0 and "time_of_peer" not in row for row in written[::2])
    # The pass that a peer has is timed where it refuses the other.
    refuses = {"seconds": 2.0, "refused": {"train": "RuntimeError: this Triton is wrong"}}
    run("benchmarks.kernels.gated_delta", *options, peer=lambda task: refuses)
    _, forward, _, train = result(out)["rows"]
    assert forward["seconds"] == 2.0
    assert "failed" not in forward
    assert train["failed"] == "RuntimeError: this Triton is wrong"
    assert "seconds" not in train


def test_the_selection_by_its_kernel_and_by_plain_jax(tmp_path, monkeypatch):
    spec = selection.TopKSpec(name="small", tokens=5, subkeys=8, key=4, top_k=2)
    monkeypatch.setattr(selection, "SPECS", (spec,))
    monkeypatch.setattr(selection, "SHAPES", {"tiny": ("small",)})
    out = tmp_path / "selection.json"
    options = ("--passes", "forward", "train", "--backends", "pallas", "reference")
    run("benchmarks.kernels.selection", "--size", "tiny", *options, "--repeats", 1, "--out", out)
    rows = result(out)["rows"]
    assert [(row["passes"], row["backend"]) for row in rows] == [
        *(("forward", "pallas"), ("forward", "reference")),
        *(("train", "pallas"), ("train", "reference")),
    ]
    assert all(row["share_of_matmul"] > 0 for row in rows)


def test_determinism(tmp_path):
    out = tmp_path / "determinism.json"
    run("benchmarks.kernels.determinism", "--size", "tiny", "--out", out)
    assert all(row["bitwise_equal"] for row in result(out)["rows"])
    assert all(row["error_against_float64"] < 1e-4 for row in result(out)["rows"])


def test_parity_counts_what_the_tests_said(tmp_path):
    test = tmp_path / "test_sample.py"
    lines = ["import pytest", "pytestmark = pytest.mark.gpu", "def test_good(): pass"]
    lines += ["def test_bad(): assert 0", "def test_away(): pytest.skip('no GPU')"]
    test.write_text("\n".join(lines))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: here\n    tpu: here\n")
    out = tmp_path / "parity.json"
    assert run("benchmarks.kernels.parity", "--tests", test, "--out", out) == 1
    written = result(out)
    assert (written["tests"], written["failures"], written["skipped"]) == (3, 1, 1)
    assert written["failed"] == ["test_bad"]
