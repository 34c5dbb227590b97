"""The suite for the first minutes on a device: its order, its limits, what it keeps and reports."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from benchmarks import processes
from benchmarks.bring_up import cases, correctness, sources, steps, suite, variants
from benchmarks.bring_up.files import read_lines
from benchmarks.bring_up.tables import account_table, schedule_table, steps_table
from benchmarks.kernels import gated_delta
from benchmarks.options import parse
from benchmarks.processes import ROOT
from benchmarks.speed import models
from pallas_kernels import dispatch
from tests.benchmarks import planted_cases
from tests.benchmarks.programs import ran_alone, result, run


@pytest.mark.slow
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
    # No case starts when the time is over.
    over = replace(options, seconds=0)
    assert correctness.run_cases({"right": 1, "late": 1}, over, module="nowhere") == [again[1]]
    assert "late: not started, 0 s are over" in capsys.readouterr().out


def test_the_cases_reach_the_steady_state_of_every_kernel():
    found = cases.cases("paper")
    for name in (
        *("product_top_k/steady", "slot_add/wide_distinct", "slot_add/wide_zipf"),
        *("slot_add/hottest", "slot_read/hottest", "slot_dot/wide_zipf"),
        *("chunk_gated_delta_rule/five_chunks/float32", "memory/1_groups", "memory/8_groups"),
        *("memory/keys_paper_widths/bfloat16", "choice/key_scan"),
        *("mix_rms_norm/paper/bfloat16", "embed/paper"),
        *("chunk_gated_delta_rule/five_chunks/bfloat16", "choice/value_scan"),
    ):
        assert name in found
    operations = {name.split("/")[0] for name in found}
    assert operations == {name.split("/")[0] for name in cases.cases("tiny")}
    places = {name: case.place for name, case in found.items()}
    assert places["slot_add/paper"] == places["choice/value_scan"] == 0
    assert places["memory/1_groups"] < places["chunk_gated_delta_rule/widest/float32"] == 2
    long = ("choice", "memory")
    assert all(case.limit_s <= 120 for name, case in found.items() if not name.startswith(long))


def test_a_case_names_every_folder_whose_code_it_runs():
    kernels = suite.ROOT / sources.KERNELS
    for name, case in cases.cases("paper").items():
        for folder in case.folders:
            code = "".join(file.read_text() for file in (kernels / folder).glob("*.py"))
            used = set(re.findall(r"^from pallas_kernels(?:\.| import )(\w+)", code, re.MULTILINE))
            used = {one for one in used if (kernels / one).is_dir()}
            assert used <= set(case.folders), name


def test_an_error_that_is_no_number_is_too_large():
    row = cases.outcome(planted_cases.case_with(float("nan")))
    assert (row["verdict"], row["worst"]) == ("differs", "d_keys")


@pytest.mark.slow
def test_a_case_reports_error_time_and_what_ran(monkeypatch):
    # A case has a process of its own; here other tests ran before it.
    monkeypatch.setattr(dispatch, "decisions", type(dispatch.decisions)())
    row = cases.work({"size": "tiny", "case": "slot_dot/63_tokens"})
    assert row["verdict"] == "agrees"
    assert 0 < row["error"] <= row["allowed"]
    assert row["milliseconds"] > 0 < row["reference_milliseconds"]
    kernels = [one for one in row["implementations"] if one["op"] == "slot_dot"]
    assert {one["implementation"] for one in kernels} == {"tpu"}


@pytest.mark.slow
def test_planted_variants_cost_a_line_each_and_the_rest_is_timed(tmp_path, capsys):
    options = steps.Options(
        out=tmp_path / "steps.jsonl",
        profiles=tmp_path / "profiles.json",
        models=("differs", "dies_in_profile"),
        executables=tmp_path,
        jobs=8,
        compile_s=20,
    )
    rows = steps.run_variants(options, module="tests.benchmarks.planted_steps")
    found = {(row["model"], row["variant"]): row for row in rows}
    failures = {
        "carried": "exit code 1: ValueError: INTERNAL: the topology is another one",
        "flags": "died by SIGSEGV",
        "both": "no result after 20 s",
        "graphs": "exit code 1: MemoryError: RESOURCE_EXHAUSTED",
    }
    for model in options.models:
        for name, failure in failures.items():
            assert found[model, name]["failed"] == failure
        for name, reference in {
            "all": "",
            "baseline": "new_op,other_op",
            "without_new_op": "new_op",
            "without_other_op": "other_op",
        }.items():
            row = found[model, name]
            assert (row["milliseconds"], row["reference"]) == (10.0, reference)
    assert len(rows) == 18
    assert found["differs", "all"]["differing"] == ["[0].params"]
    assert found["dies_in_profile", "all"]["profile_failed"] == "died by SIGKILL"
    printed = capsys.readouterr().out
    assert "differs all: 10.00 ms, 100.0 samples/s, NOT the same bits twice" in printed
    assert "dies_in_profile all: 10.00 ms, 100.0 samples/s, profile failed, died by SIG" in printed
    profiles = {f"differs/{name}": [["fusion", 2.0, 0.5]] for name in ("all", "deterministic")}
    assert result(tmp_path / "profiles.json") == profiles
    assert len(read_lines(options.out)) == 18

    # What was measured of this source and device stays; what failed is measured again.
    again = replace(options, device="a device", variants=("all", "flags"))
    rows = steps.run_variants(again, module="nowhere")
    assert [row["failed"][:5] for row in rows if row["variant"] == "flags"] == ["exit "] * 2
    assert len([row for row in rows if "failed" not in row]) == 10
    assert result(tmp_path / "profiles.json") == profiles
    capsys.readouterr()
    other = replace(again, device="another device", variants=("all",), seconds=0)
    assert {row["failed"] for row in steps.run_variants(other, module="nowhere")} == {
        "not started: the time was over"
    }
    assert result(tmp_path / "profiles.json") == profiles


@pytest.mark.slow
def test_timing_waits_for_a_file_and_says_what_it_left_out(tmp_path):
    options = steps.Options(
        out=tmp_path / "steps.jsonl",
        models=("differs",),
        variants=("all",),
        operations=(),
        wait_for=tmp_path / "go",
        seconds=4,
    )
    (row,) = steps.run_variants(options, module="tests.benchmarks.planted_steps")
    assert row["failed"] == "not timed: the time was over"
    (tmp_path / "go").touch()
    (row,) = steps.run_variants(options, module="tests.benchmarks.planted_steps")
    assert row["milliseconds"] == 10.0


def test_every_new_operation_gets_a_variant_without_it():
    found = {one.name: one for one in variants.variants(("a", "b"), carried=True)}
    assert list(found)[:2] == ["carried", "all"]
    assert found["baseline"].reference == ("a", "b")
    assert found["without_b"].reference == ("b",)
    assert "triton_gemm=false" in found["both"].flags
    assert "deterministic_ops=true" in found["deterministic"].flags
    assert found["deterministic"].profiled
    assert "command_buffer" in found["both"].flags
    alone = [one.name for one in variants.variants(("a",), carried=False)]
    assert alone == ["all", "flags", "baseline", "deterministic", "both", "graphs"]


@pytest.mark.slow
def test_variants_of_a_real_step_agree_and_its_executable_comes_home(
    tmp_path, monkeypatch, request
):
    if ran_alone(request):
        return
    monkeypatch.setattr(models, "TINY_LAYERS", 1)
    sizes = ("--size", "tiny", "--models", "gdn", "--batch", 1, "--length", 32)
    run("benchmarks.compiled.executables", "--device", "cpu", *sizes, "--out", tmp_path / "made")
    (tmp_path / "go").touch()
    out, profiles = tmp_path / "steps.jsonl", tmp_path / "profiles.json"
    options = (
        *("--out", out, "--profiles", profiles, "--keep", tmp_path / "kept", "--steps", 1),
        *("--variants", "carried", "all", "baseline", "--operations", "new_op", "--blocks", 2),
        *("--executables", tmp_path / "made", "--wait-for", tmp_path / "go", "--jobs", 1),
        *("--device", "cpu", "--compile-s", 600, "--run-s", 600, "--seconds", 1200),
        *("--size", "tiny", "--models", "gdn", "--batch", 1, "--length", 32),
    )
    assert run("benchmarks.bring_up.steps", *options) == 0
    rows = {row["variant"]: row for row in read_lines(out)}
    assert list(rows) == ["carried", "all", "baseline"]
    assert len({row["final_loss"] for row in rows.values()}) == 1
    # The program that makes the first state is compiled once.
    assert not any("state_compiled" in row for row in rows.values())
    assert rows["all"]["differing"] == []
    assert rows["all"]["first_loss"] != rows["all"]["final_loss"]
    chosen = {one["op"] for one in rows["all"]["implementations"]}
    assert "chunk_gated_delta_rule" in chosen
    assert rows["carried"]["facts"]["model"] == "gdn"
    assert rows["carried"]["of_this_source"]
    names, *_ = zip(*result(profiles)["gdn/all"], strict=True)
    assert len(names) > 50
    assert (tmp_path / "kept" / "gdn.exe.xz").stat().st_size == pytest.approx(
        1e6 * rows["all"]["kept_megabytes"]
    )
    # All three are measured: the second call runs none of them.
    monkeypatch.setattr(steps, "talk", None)
    assert run("benchmarks.bring_up.steps", *options) == 0


def test_the_device_is_described_before_it_is_measured(tmp_path):
    out = tmp_path / "device.json"
    run("benchmarks.bring_up.device", "--out", out)
    found = result(out)
    assert found["device"] == jax.devices()[0].device_kind
    assert found["environment"]["copy_gigabytes_per_second"] == 1.0
    assert found["libraries"]["jax"] == jax.__version__
    assert set(found["driver"]) == {"unknown"} or isinstance(found["driver"], str)


@pytest.mark.slow
def test_the_operations_with_kernels_are_found_by_tracing():
    from benchmarks.options import to_json

    options = steps.Options(out=suite.ROOT, models=("gdn__fwpkm2_6_10",))
    found = steps.work({"options": to_json(options)})["operations"]
    assert {"chunk_gated_delta_rule", "key_scan", "value_scan"} <= set(found)


def test_a_line_counts_for_its_source_and_device_only(tmp_path, monkeypatch):
    for folder in ("pallas_kernels/one", "pallas_kernels/two", "fwpkm_jax", "benchmarks/speed"):
        (tmp_path / folder).mkdir(parents=True)
    files = ("one/a", "two/b", "dispatch")
    for name in (*(f"pallas_kernels/{x}" for x in files), "fwpkm_jax/c", sources.STEP[:-3]):
        (tmp_path / f"{name}.py").write_text("1")
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def hashes():
        sources.digest.cache_clear()
        return [sources.of_case(("one",)), sources.of_case(("two",)), sources.of_case(())]

    def changed(file):
        before = hashes()
        (tmp_path / file).write_text("2")
        return [one != other for one, other in zip(before, hashes(), strict=True)]

    assert changed("pallas_kernels/one/a.py") == [True, False, True]
    assert changed("pallas_kernels/dispatch.py") == [True, True, True]
    assert changed("fwpkm_jax/c.py") == [False, False, True]
    with pytest.raises(FileNotFoundError, match="three is neither a file nor a folder"):
        sources.of_case(("three",))
    sources.digest.cache_clear()
    row = {"source": "s", "device": "H200"}
    asked = [("s", "H200"), ("s", None), ("s", "H100"), ("t", "H200")]
    assert [sources.is_measured(row, *one) for one in asked] == [True, True, False, False]


@pytest.fixture
def taken(monkeypatch):
    """Makes parts of the suite; returns how each was called, and for how long waited for."""
    calls = []

    class Part:
        def __init__(self, command, added):
            self.command, self.began = command, time.perf_counter()
            calls.append([command, None, added])
            self.call = calls[-1]

        def wait(self, limit_s):
            self.call[1] = limit_s
            row = {"rows": [1]}
            if "--out" not in self.command:
                return None
            out = self.command[self.command.index("--out") + 1]
            if out.endswith("cases.jsonl"):
                row = {"case": "slot_read/x", "verdict": "agrees"}
            if out.endswith("steps.jsonl"):
                row = {"model": "gdn", "variant": "all"}
            if self.command[0].endswith("device"):
                row = {"device": "a device"}
            with open(out, "w") as file:
                file.write(json.dumps(row))
            return "ended after its 7 s" if self.command[0].endswith("decode") else None

        def end(self): ...

    monkeypatch.setattr(suite, "Part", Part)
    return calls


def names(calls):
    return [command[0].rpartition(".")[2] for command, *_ in calls]


def test_the_suite_goes_on_where_it_stopped(tmp_path, taken, capsys, monkeypatch):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "small.whl", "w") as wheel:
        wheel.writestr("small.py", "")
    base = (
        *("--size", "tiny", "--cache", tmp_path / "cache"),
        *("--peer", "C", "--peer-python", "p", "--peer-fla", "f", "--peer-titans", "t"),
    )
    some = (*base, "--parts", "device", "cases", "memory", "decode")
    limits = ("--seconds", 60, "--part-seconds", 7, "--wheels", tmp_path / "wheels")
    more = ("--reference", "value_scan", "slot_read", "--jobs", 3)
    assert run("benchmarks.bring_up.suite", "--out", first, *some, *limits, *more) == 1
    assert names(taken) == ["device", "correctness", "memory", "decode"]
    assert {limit for _, limit, _ in taken} == {7}
    cases_command = taken[1][0]
    assert cases_command[cases_command.index("--jobs") + 1] == "3"
    assert cases_command[-4:] == ["--device", "a device", "--seconds", "2"]
    added = taken[0][2]
    assert added["PALLAS_KERNELS_REFERENCE"] == "value_scan,slot_read"
    assert added["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    assert str(tmp_path / "cache" / "packages") in added["PYTHONPATH"].split(":")
    assert "decode: ended after its 7 s" in capsys.readouterr().out
    found = result(first / "results.json")
    assert found["decode"]["status"] == "ended after its 7 s"
    assert found["decode"]["result"] == found["memory"]["result"] == {"rows": [1]}
    assert found["cases"]["result"] == {"agrees": 1}
    assert {row["source"] for row in found.values()} == {sources.of_step()}
    for name in (suite.PROFILES, suite.VERDICTS):
        (first / name).write_text("{}")

    # The device is described anew; parts with lines see for themselves what is measured.
    taken.clear()
    assert run("benchmarks.bring_up.suite", "--out", second, "--earlier", first, *some) == 1
    assert names(taken) == ["device", "correctness", "decode"]
    assert "PALLAS_KERNELS_REFERENCE" not in taken[0][2]
    files = sorted(path.name for path in second.iterdir())
    assert files == ["cases.jsonl", "profiles.json", "results.json", "verdicts.json"]

    taken.clear()
    assert (
        run("benchmarks.bring_up.suite", "--out", second, *some, "--again", "slot_read", "mem") == 1
    )
    assert names(taken) == ["device", "correctness", "memory", "decode"]
    taken.clear()
    capsys.readouterr()
    assert run("benchmarks.bring_up.suite", "--out", second, *some, "--seconds", 0) == 1
    assert not taken
    assert "decode: not started, 0 s are over" in capsys.readouterr().out
    assert result(second / "results.json")["memory"]["status"] == "done"
    # Another source, or another device: everything is measured again.
    monkeypatch.setattr(sources, "of_step", lambda: "another")
    assert run("benchmarks.bring_up.suite", "--out", second, *some) == 1
    assert names(taken) == ["device", "correctness", "memory", "decode"]
    with pytest.raises(SystemExit, match="no such part"):
        run("benchmarks.bring_up.suite", "--out", third, *base, "--parts", "layers")


def test_steps_compile_beside_the_comparisons_and_are_timed_after_them(tmp_path, taken):
    some = ("--parts", "device", "cases", "steps", "gated_delta", "--peer-fla", "f")
    options = ("--size", "tiny", "--cache", tmp_path, "--operations", "new_op")
    earlier = tmp_path / "earlier"
    (earlier / suite.COMPILED).mkdir(parents=True)
    out = tmp_path / "out"
    assert (
        run("benchmarks.bring_up.suite", "--out", out, "--earlier", earlier, *options, *some) == 0
    )
    assert names(taken) == ["device", "steps", "gated_delta", "correctness", "gated_delta"]
    began, prepared = taken[1][0], taken[2][0]
    assert began[began.index("--operations") + 1] == "new_op"
    assert began[began.index("--executables") + 1] == str(earlier / suite.COMPILED)
    assert 500 < float(began[began.index("--seconds") + 1]) < 540
    compared = taken[3][0]
    assert float(compared[compared.index("--seconds") + 1]) == 0.4 * 540 - 5
    assert "--wait-for" in began
    assert prepared[-1] == "--prepare"
    assert "--prepare" not in taken[4][0]
    found = result(out / "results.json")
    # A part that waits for another has its own seconds after those of the other.
    short = ("--parts", "device", "cases", "steps", "--part-seconds", 50)
    assert run("benchmarks.bring_up.suite", "--out", tmp_path / "short", *options, *short) == 0
    began = next(one for one, *_ in taken[len(names(taken)) - 2 :] if "--wait-for" in one)
    assert float(began[began.index("--seconds") + 1]) == 2 * 50 - 5
    given = (
        *("--executables", tmp_path, "--variants", "carried", "flags"),
        *("--parts", "steps", "real_model", "--real-model", "runs/memory"),
    )
    assert run("benchmarks.bring_up.suite", "--out", tmp_path / "given", *options, *given) == 0
    assert taken[-1][0] == ["fwpkm_jax", "train", "--resume", "runs/memory"]
    last = taken[-2][0]
    assert last[last.index("--executables") + 1] == str(tmp_path)
    named = last.index("--variants")
    assert last[named + 1 : named + 3] == ["carried", "flags"]
    assert list(found) == ["device", "cases", "steps", "gated_delta"]
    assert found["steps"]["result"] == {"timed": 1}
    assert all(row["status"] == "done" for row in found.values())


def test_the_tiny_run_exercises_every_option_of_the_run_on_a_device(tmp_path):
    peers = ("--peer", "C", "--peer-python", "p", "--peer-fla", "f", "--peer-titans", "t")
    commands = {}
    for size in ("tiny", "paper"):
        arguments = ("--out", tmp_path, "--size", size, "--executables", tmp_path, *peers)
        options = parse(suite.Options, [str(argument) for argument in arguments])
        commands[size] = suite.parts(options)
        for module, *rest in commands[size].values():
            parse(importlib.import_module(module).Options, rest)

    def named(command):
        return {x.replace("_", "-") for x in command if x.startswith("--")}

    for name, command in commands["paper"].items():
        assert named(command) <= named(commands["tiny"][name]), name


def test_the_rule_is_timed_beside_another_package_on_request(tmp_path, taken):
    some = ("--cache", tmp_path, "--parts", "gated_delta", "--peer-jla")
    assert run("benchmarks.bring_up.suite", "--out", tmp_path / "out", *some) == 0
    _, *rest = taken[-1][0]
    assert parse(gated_delta.Options, rest).backends == ("pallas", "jla")


SITTING = {
    "device": 20, "steps": 45, "memory": 60, "gated_delta": 230, "real_model": 120, "cases": 216,
    "decode": 60,
}  # fmt: skip
"""What docs/howto/bring_up.md runs in a sitting, most valuable first, with the seconds that it
estimates; for `steps` those of loaded executables."""


@pytest.mark.parametrize("hangs", [(), tuple(SITTING)])
def test_the_command_of_a_sitting_ends_within_nine_minutes(tmp_path, monkeypatch, hangs):
    page = (ROOT / "docs" / "howto" / "bring_up.md").read_text()
    (line,) = re.findall(
        r"```bash\n(python -m benchmarks.bring_up [^`]*--real-model[^`]*)```", page
    )
    words = shlex.split(line.replace("\\\n", ""))[3:]
    words[words.index("--out") + 1] = str(tmp_path / "out")
    words[words.index("--earlier") + 1] = str(tmp_path / "none")
    words += ["--cache", str(tmp_path / "cache")]
    wanted = words[words.index("--parts") + 1 :][: len(SITTING)]
    assert wanted == list(SITTING)
    now, waited = [0.0], {}

    class Part:
        def __init__(self, command, added):
            self.began, self.command = now[0], command

        def wait(self, limit_s):
            name = next(
                x for x, command in suite.parts(options).items() if command[0] in self.command
            )
            waited[name] = limit_s if name in hangs else min(limit_s, SITTING[name])
            now[0] += waited[name]
            return "ended" if waited[name] == limit_s else None

        def end(self): ...

    options = parse(suite.Options, words)
    monkeypatch.setattr(suite, "Part", Part)
    monkeypatch.setattr(suite.time, "perf_counter", lambda: now[0])
    run("benchmarks.bring_up.suite", *words)
    assert now[0] <= 540
    if not hangs:
        assert [*waited][:6] == list(SITTING)[:6]
        assert all(waited[name] == SITTING[name] for name in list(SITTING)[:5])


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


def test_a_suite_that_is_stopped_ends_what_it_started(tmp_path):
    alive = tmp_path / "alive"
    code = f"import time; open({str(alive)!r}, 'w'); time.sleep(600)"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif sys.orig_argv[1:3] == ['-m', 'benchmarks.bring_up.device']: {code}"
    )
    command = [sys.executable, "-m", "benchmarks.bring_up", "--out", str(tmp_path / "out")]
    command += ["--cache", str(tmp_path), "--parts", "device"]
    paths = os.pathsep.join((str(tmp_path), str(suite.ROOT)))
    run = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})
    while not alive.exists():
        time.sleep(0.05)
    (part,) = processes.descendants(run.pid)
    run.terminate()
    assert run.wait(timeout=30) == 143
    assert not Path(f"/proc/{part}").exists()
    assert result(tmp_path / "out" / "results.json") == {}


def test_the_comparison_fails_if_a_case_does_not_agree(tmp_path, monkeypatch, capsys):
    errors = {"one": 0.0, "two": 1.0}
    found = {
        name: cases.Case(run=lambda error=error: {"errors": {"output": error}})
        for name, error in errors.items()
    }
    monkeypatch.setattr(cases, "cases", lambda size: found)
    out = tmp_path / "cases.jsonl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = (
        *("--out", out, "--size", "tiny", "--jobs", 1, "--limit-s", 60, "--seconds", 600),
        *("--device", jax.devices()[0].device_kind, "--verdicts", tmp_path / "verdicts.json"),
    )
    assert run("benchmarks.bring_up.correctness", *options) == 1
    assert result(tmp_path / "verdicts.json") == {}
    assert "1 of 2 cases do not agree: two\n" in capsys.readouterr().err
    del found["two"]
    assert run("benchmarks.bring_up.correctness", *options) == 0
    assert "one" not in capsys.readouterr().out


def test_an_account_stands_beside_the_one_before():
    def account(model, ms, **kinds):
        rows = [
            {
                "class": kind,
                "launches": 1000.0,
                "gigabytes": size,
                "h200_ms": 0.5,
                "measured_ms": ms,
            }
            for kind, size in kinds.items()
        ]
        total = {"launches": 3e3, "gigabytes": 9.0, "h200_ms": 1.0, "measured_ms": 2 * ms}
        return {"model": model, "rows": rows, "total": total, "measured_on": "h200"}

    head, _, *rows = account_table(
        [account("a", 2.0, products=3.0, gone=1.0), account("a", 1.0, products=2.0)]
    ).splitlines()
    assert head.endswith("| H200 by the cost model, ms (before) | measured, ms | before, ms |")
    assert rows == [
        "| products | 1,000 (1,000) | 2.0 (3.0) | 0.5 (0.5) | 1.0 | 2.0 |",
        "| gone | 0 (1,000) | 0.0 (1.0) | 0.0 (0.5) | 0.0 | 2.0 |",
        "| all | 3,000 (3,000) | 9.0 (9.0) | 1.0 (1.0) | 2.0 | 4.0 |",
    ]
    later = account("a", 0.0, products=3.0, gone=0.5)
    del later["measured_on"]
    head, _, *rows = account_table([account("a", 2.0, products=3.0, gone=1.0), later]).splitlines()
    assert head.endswith("| GB (before) | H200 by the cost model, ms (before) |")
    assert rows == [
        "| gone | 1,000 (1,000) | 0.5 (1.0) | 0.5 (0.5) |",
        "| all | 3,000 (3,000) | 9.0 (9.0) | 1.0 (1.0) |",
    ]
    with pytest.raises(ValueError, match="there are 1 accounts"):
        account_table([account("a", 2.0, products=3.0)])


def test_variants_that_were_not_timed_have_no_row():
    row = {"model": "a", "variant": "all", "milliseconds": 62.875, "milliseconds_spread": 1.5}
    row |= {"samples_per_second": 127.24, "final_loss": 0.45882}
    *_, only = steps_table([row, {"model": "a", "variant": "both", "failed": "late"}]).splitlines()
    assert only == "| `a` | `all` | 62.9 | 1.5 | 127 | 0.4588 |"


def test_a_table_has_a_kernels_schedule_beside_the_one_before():
    def scheduled(cycles, used, megabytes, device="v5e"):
        about = {"device": device, "size": "paper", "kernel": "walk", "bundles": 2}
        return about | {
            "million_cycles": cycles,
            "used": {"MXU": used},
            "megabytes": megabytes,
        }

    together = {"device": "v5e", "size": "paper", "kernel": "all", "peak": 3.0}
    before, after = scheduled(10.04, 0.4, 1500.4), scheduled(3.7, 0.89, 300.0)
    *_, row = schedule_table([before, together, after, together]).splitlines()
    assert row == "| v5e | paper | `walk` | 3.7 (10.0) | 0.89 (0.40) | 300 (1,500) |"
    with pytest.raises(ValueError, match=r"\('v6e', 'paper', 'walk'\)\] are not in two"):
        schedule_table([before, after, scheduled(1.0, 0.5, 2.0, device="v6e")])
