"""The suite for the first minutes on a device: its order, its limits, what it keeps and reports."""

import importlib
import json
import time
import zipfile

import pytest

from benchmarks.first_light import cases, correctness, suite
from benchmarks.first_light.files import read_lines
from benchmarks.options import parse
from pallas_kernels import dispatch
from tests.benchmarks import planted_cases
from tests.benchmarks.programs import result, run


@pytest.mark.thorough
def test_planted_cases_cost_a_line_each_and_the_rest_goes_on(tmp_path, capsys):
    out = tmp_path / "cases.jsonl"
    out.write_text('{"case": "dies", "verd')  # As a session leaves it that is ended while writing.
    limits = {"hangs": 2.0} | dict.fromkeys(("dies", "raises", "wrong", "right"), 60.0)
    options = correctness.Options(out=out, size="tiny", jobs=3)
    rows = correctness.run_cases(limits, options, module="tests.benchmarks.planted_cases")
    assert [row["case"] for row in rows] == list(limits)
    lines = capsys.readouterr().out.splitlines()
    beginnings = {
        "hangs": "hangs: failed, no result after 2 s",
        "dies": "dies: failed, died by SIGSEGV",
        "raises": "raises: failed, exit code 1: ValueError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS",
        "wrong": "wrong: differs, error 0.3 of 1e-05 in d_keys, 1.000 ms",
        "right": "right: agrees, error 1e-07 of 1e-05 in d_keys",
    }
    for name, beginning in beginnings.items():
        (line,) = (line for line in lines if line.startswith(f"{name}:"))
        assert line.startswith(beginning)
    assert [row["verdict"] for row in read_lines(out)].count("agrees") == 1
    assert len(read_lines(out)) == len(limits)
    # What is in the file is not run again.
    again = correctness.run_cases({"hangs": 0.1, "right": 0.1}, options, module="nowhere")
    assert [row["verdict"] for row in again] == ["failed", "agrees"]


def test_the_cases_reach_the_steady_state_of_every_kernel():
    found = cases.cases("paper")
    for name in (
        *("product_top_k/steady", "slot_add/wide_distinct", "slot_add/wide_zipf"),
        *("slot_add/hottest", "slot_read/hottest", "slot_dot/wide_zipf"),
        *("chunk_gated_delta_rule/five_chunks/float32", "memory/1_groups", "memory/8_groups"),
        *("memory/keys_paper_widths", "choice/key_scan"),
        *("chunk_gated_delta_rule/five_chunks/bfloat16", "choice/value_scan"),
    ):
        assert name in found
    operations = {name.split("/")[0] for name in found}
    assert operations == {name.split("/")[0] for name in cases.cases("tiny")}
    long = ("choice", "memory")
    assert all(case.limit_s <= 120 for name, case in found.items() if not name.startswith(long))


def test_an_error_that_is_no_number_is_too_large():
    row = cases.outcome(planted_cases.case_with(float("nan")))
    assert (row["verdict"], row["worst"]) == ("differs", "d_keys")


@pytest.mark.thorough
def test_a_case_reports_error_time_and_what_ran(monkeypatch):
    # A case has a process of its own; here other tests ran before it.
    monkeypatch.setattr(dispatch, "decisions", type(dispatch.decisions)())
    row = cases.work({"size": "tiny", "case": "slot_dot/63_tokens"})
    assert row["verdict"] == "agrees"
    assert 0 < row["error"] <= row["allowed"]
    assert row["milliseconds"] > 0 < row["reference_milliseconds"]
    kernels = [one for one in row["implementations"] if one["op"] == "slot_dot"]
    assert {one["implementation"] for one in kernels} == {"tpu"}


@pytest.fixture
def taken(monkeypatch):
    """Makes parts of the suite; returns how each was called."""
    calls = []

    def run_part(command, *, limit_s, added):
        calls.append((command, limit_s, added))
        out = command[command.index("--out") + 1]
        with open(out, "w") as file:
            row = {"case": "slot_read/x", "verdict": "agrees"}
            file.write(json.dumps(row if out.endswith("jsonl") else {"rows": [1]}))
        return "ended after its 7 s" if command[0].endswith("decode") else None

    monkeypatch.setattr(suite, "run_part", run_part)
    return calls


def names(calls):
    return [command[0].rpartition(".")[2] for command, *_ in calls]


def test_the_suite_goes_on_where_it_stopped(tmp_path, taken, capsys):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "small.whl", "w") as wheel:
        wheel.writestr("small.py", "")
    base = (
        *("--size", "tiny", "--cache", tmp_path / "cache"),
        *("--peer", "C", "--peer-python", "p", "--peer-fla", "f", "--peer-titans", "t"),
    )
    some = (*base, "--parts", "cases", "decode", "train_step")
    limits = ("--seconds", 60, "--part-seconds", 7, "--wheels", tmp_path / "wheels")
    more = ("--require-kernels", "--reference", "value_scan", "slot_read", "--jobs", 3)
    assert run("first_light.suite", "--out", first, *some, *limits, *more) == 1
    assert names(taken) == ["correctness", "decode", "train_step"]
    assert {limit for _, limit, _ in taken} == {7}
    assert taken[0][0][-4:-2] == ["--jobs", "3"]
    assert "--require-kernels" in taken[2][0]
    added = taken[0][2]
    assert added["PALLAS_KERNELS_REFERENCE"] == "value_scan,slot_read"
    assert added["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    assert str(tmp_path / "cache" / "packages") in added["PYTHONPATH"].split(":")
    assert "decode: ended after its 7 s" in capsys.readouterr().out
    found = result(first / "results.json")
    assert found["decode"]["status"] == "ended after its 7 s"
    assert found["decode"]["result"] == found["train_step"]["result"] == {"rows": [1]}
    assert found["cases"]["result"] == {"agrees": 1}
    (first / "slots.npz").write_text("recorded")

    taken.clear()
    assert run("first_light.suite", "--out", second, "--earlier", first, *some) == 1
    assert names(taken) == ["decode"]
    assert "PALLAS_KERNELS_REFERENCE" not in taken[0][2]
    files = sorted(path.name for path in second.iterdir())
    assert files == ["cases.jsonl", "results.json", "slots.npz"]

    taken.clear()
    assert run("first_light.suite", "--out", second, *some, "--again", "slot_read", "train") == 1
    assert names(taken) == ["correctness", "decode", "train_step"]
    taken.clear()
    assert run("first_light.suite", "--out", second, *some, "--seconds", 0) == 1
    assert not taken
    # Recorded slots are timed where there are some.
    assert run("first_light.suite", "--out", second, *base, "--parts", "rows") == 0
    assert run("first_light.suite", "--out", third, *base, "--parts", "rows") == 0
    assert ["--stream" in command for command, *_ in taken] == [True, False]
    with pytest.raises(SystemExit, match="no such part"):
        run("first_light.suite", "--out", second, *base, "--parts", "layers")


def test_the_tiny_run_exercises_every_option_of_the_run_on_a_device(tmp_path):
    peers = ("--peer", "C", "--peer-python", "p", "--peer-fla", "f", "--peer-titans", "t")
    commands = {}
    for size in ("tiny", "paper"):
        (tmp_path / suite.SLOTS).touch()
        arguments = ("--out", tmp_path, "--size", size, "--require-kernels", *peers)
        options = parse(suite.Options, [str(argument) for argument in arguments])
        commands[size] = suite.parts(options)
        for module, *rest in commands[size].values():
            parse(importlib.import_module(module).Options, rest)

    def named(command):
        return {x.replace("_", "-") for x in command if x.startswith("--")}

    for name, command in commands["paper"].items():
        assert named(command) <= named(commands["tiny"][name]), name


def test_wheels_are_unpacked_for_the_parts(tmp_path):
    with zipfile.ZipFile(tmp_path / "small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small.py", "print('from a wheel')")
    options = suite.Options(out=tmp_path, wheels=tmp_path, cache=tmp_path / "cache")
    assert suite.run_part(["small"], limit_s=60, added=suite.variables(options)) is None
    with pytest.raises(SystemExit, match=r"has no files \*\.whl"):
        suite.unpack(tmp_path / "cache", tmp_path)


def test_a_part_that_hangs_is_ended_with_all_it_started_and_one_that_fails_is_reported(
    tmp_path, monkeypatch, capsys
):
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(2); open({str(alive)!r}, 'w')"
    start = f"subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    for name, code in {
        "hangs": f"import subprocess, sys; print('began', flush=True); {start}",
        "fails": "print('some output'); raise SystemExit('the reason')",
        "works": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.perf_counter()
    assert suite.run_part(["hangs"], limit_s=1.5) == "ended after its 1.5 s"
    assert suite.run_part(["fails"], limit_s=60) == "exit code 1: the reason"
    assert suite.run_part(["works"], limit_s=60) is None
    printed = capsys.readouterr().out
    assert "began\n" in printed
    assert "some output\n" in printed
    time.sleep(max(0.0, began + 3 - time.perf_counter()))
    assert not alive.exists()


def test_the_comparison_fails_if_a_case_does_not_agree(tmp_path, monkeypatch, capsys):
    errors = {"one": 0.0, "two": 1.0}
    found = {
        name: cases.Case(run=lambda error=error: {"errors": {"output": error}})
        for name, error in errors.items()
    }
    monkeypatch.setattr(cases, "cases", lambda size: found)
    out = tmp_path / "cases.jsonl"
    options = ("--out", out, "--size", "tiny", "--jobs", 1, "--limit-s", 60)
    assert run("first_light.correctness", *options) == 1
    assert "1 of 2 cases do not agree: two\n" in capsys.readouterr().err
    del found["two"]
    assert run("first_light.correctness", *options) == 0
    assert "one" not in capsys.readouterr().out
