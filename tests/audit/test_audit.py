"""The audit of a whole model: every line, the page, the bundle."""

import doctest
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from fwpkm_jax.audit import Audit, headline, origin_lines
from fwpkm_jax.audit.bundle import recomputed, write_bundle
from fwpkm_jax.audit.lines import Line
from fwpkm_jax.audit.model_paths import chat_causality
from fwpkm_jax.audit.page import page, summary
from fwpkm_jax.cli import audit_command, demo_command, main
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import RecallData
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.io.untrusted import OutsideFileError
from tests.audit.test_origin import answers
from tests.cli.conftest import text_run
from tests.interchange.make_families import DATA as FAMILIES
from tests.interchange.make_families import write_model
from tests.training.mesh_flags import environment

ROOT = Path(__file__).parents[2]
__all__ = ["text_run"]  # A fixture.


@pytest.mark.slow
def test_a_later_message_of_a_chat_moves_no_earlier_answer(text_run):
    line = chat_causality(text_run)
    assert (line.name, line.verdict) == ("chat", "pass"), line.text


def test_the_pages_program_runs_and_says_what_it_says():
    page = Path(__file__).parents[2] / "docs" / "howto" / "audit.md"
    failed, tried = doctest.testfile(str(page), module_relative=False)
    assert (failed, tried) == (0, 6)


LINES = [
    Line(section="causality", name="whole pass", verdict="pass", text="Nothing moved."),
    Line(section="isolation", name="users <b>", verdict="fail", text="Shared.", numbers={"n": 1}),
]


def test_the_page_shows_every_line_and_its_verdict():
    markup = page(
        LINES,
        title="Audit",
        headline="All is well.",
        figures={"recall": "<1>"},
        provenance={"run": "runs/a"},
    )
    assert '<td class="pass">pass</td><td class="name">whole pass</td>' in markup
    assert '<td class="fail">fail</td><td class="name">users &lt;b&gt;</td>' in markup
    assert "1 checks passed, 1 failed" in markup
    assert "&lt;1&gt;" in markup
    assert summary(LINES).endswith("FAILED isolation, users <b>: Shared.")


def test_a_bundle_is_checked_against_its_manifest(tmp_path):
    write_bundle(tmp_path, LINES, [], title="Audit", provenance={"command": ["fwpkm", "audit"]})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["files"].keys() == {"audit.html", "audit.json", "answers.jsonl"}
    assert manifest["headline_again"] == ["fwpkm", "audit", str(tmp_path)]
    recomputed(tmp_path)
    (tmp_path / "audit.html").write_text("other")
    with pytest.raises(OutsideFileError, match="is not the file that the manifest names"):
        recomputed(tmp_path)


PATHS = (
    *("whole pass", "whole pass, rows that share a memory", "packed rows", "stream at once"),
    *("stream in pieces", "token by token"),
)
SOUND = {
    "causality": (
        *(*PATHS, "one row alone", "ways of reading agree", "paths agree", "late in a long text"),
    ),
    "indices": (
        *("training loss", "validation loss", "evaluation loss", "validation accuracy", "recall"),
    ),
    "origin": ("paths past the memory",),
    "isolation": (
        *(*PATHS, "padded rows", "padded stream", "generation", "users over one base"),
        *("documents in a row", "restored memory", "question aside", "emptied caches"),
    ),
    "stability": ("a long text",),
}
"""Lines that pass for a sound model, trained or not."""


def imported(subject, folder):
    """A run of the tiny model, on facts."""
    data = RecallData(
        length=32, num_facts=2, num_keys=6, num_values=6, num_filler=12, min_distance=12
    )
    experiment = Experiment(model=subject.model.config, data=data, run_dir=str(folder))
    return start_run(experiment, Weights(nnx.split(subject.model)[1], subject.memory))


@pytest.mark.slow
def test_the_command_tells_what_was_found_and_a_bundle_says_it_again(
    subject, tmp_path, capsys, monkeypatch
):
    directory = imported(subject, tmp_path / "run")
    found = answers("written", 12) + answers("frozen", 0)

    def audited(run, config, *, name, others, show):
        assert (run.step, config.texts, name, others) == (0, 2, str(directory), {})
        for line in LINES:
            show(line)
        return Audit([*LINES, *origin_lines(found)], found)

    monkeypatch.setattr(audit_command, "audit_run", audited)
    assert main(["audit", str(directory), "--texts", "2"]) == 1  # A line failed.
    shown = capsys.readouterr().out
    assert shown.startswith("pass    causality, whole pass: Nothing moved.\nfail    isolation")
    told = f"{headline(found)}\n  recall, written: Exact 0.500 ["
    assert told in shown
    assert main(["audit", str(directory / "audit")]) == 0
    again = capsys.readouterr().out
    assert again.startswith("pass    origin, recall, frozen: Exact 0.000 [0.000, 0.000] of 24")
    assert told in again
    assert again.endswith(f"All files of {directory / 'audit'} are those of its manifest.\n")
    (tmp_path / "link").symlink_to(directory)
    monkeypatch.setattr(audit_command, "audit_run", None)  # Calling it would raise.
    assert main(["audit", str(directory), "--out", str(tmp_path / "link")]) == 2
    assert "link is a link; a run writes inside its own folder only" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_audits_an_imported_run_whole(subject, tmp_path, capsys):
    """All lines of an untrained model, whose memory answers nothing."""
    directory = imported(subject, tmp_path / "run")
    options = ("--texts", "2", "--tokens", "600")
    code = main(["audit", str(directory), *options])
    shown = capsys.readouterr().out
    lines = dict(re.findall(r"^(?:pass|fail|skipped) +(.+?, .+?): (.*)$", shown, re.MULTILINE))
    for section, names in SOUND.items():
        for name in names:
            assert f"pass    {section}, {name}: " in shown, lines.get(f"{section}, {name}")
    assert "skipped causality, chat: Refused: The run was imported with RecallData" in shown
    assert "skipped causality, several devices: There is one device here" in shown
    assert "\n  recall, written: Exact " in shown
    assert "All losses over 512 tokens are finite" in shown
    assert code == ("FAILED" in shown)
    (told,) = re.findall(r"\n(Of \d+ stated values .*)\n", shown)
    bundle = directory / "audit"
    assert told in (bundle / "audit.html").read_text()
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert len(manifest["provenance"]["slow_weights"]) == 64


@pytest.mark.slow
def test_a_memory_put_into_a_model_of_another_library_is_audited_whole(tmp_path, capsys):
    """Of the page's commands; the model is one that transformers described, of drawn weights."""
    known = json.loads((FAMILIES / "families.json").read_text())["models"]["qwen2"]
    write_model(tmp_path / "model", known["config"], known["tensors"])
    folder, base, run = (str(tmp_path / name) for name in ("model", "base", "run"))
    assert main(["import", "hf", folder, base]) == 0
    command = ["--base", base, "--run_dir", run, "--model.memory_layers", "1"]
    command += ["--optimizer.train", ".*/memory/.*", "--model.fast_weight.chunk_size", "8"]
    rule = {"num_subkeys": 4, "key_dim": 8, "value_dim": 8, "top_k": 2}
    for name, value in rule.items():
        command += [f"--model.fast_weight.rule.{name}", str(value)]
    # A new memory adds zero to the residual stream; after these steps its reads show.
    command += ["--training.steps", "3", "--training.batch_size", "2"]
    assert main(["train", *command]) == 0
    capsys.readouterr()
    assert main(["audit", run, "--texts", "2", "--tokens", "600"]) == 0
    shown = capsys.readouterr().out
    for section, names in SOUND.items():
        for name in names:
            assert f"pass    {section}, {name}: " in shown, name
    skipped = dict(re.findall(r"^skipped (.+?, .+?): (.+)$", shown, re.MULTILINE))
    assert skipped.keys() == {"causality, chat", "causality, several devices"}
    assert "whose tokens are no text" in skipped["causality, chat"]
    assert "There is one device here" in skipped["causality, several devices"]
    assert "Mixers look without bound" in shown


@pytest.mark.slow
def test_no_token_moves_earlier_logits_over_two_devices():
    command = [sys.executable, "-m", "tests.audit.two_devices"]
    done = subprocess.run(
        command, env=os.environ | environment(2), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stdout.splitlines()[-1])
    for section, axis in itertools.product(("causality", "isolation"), ("sequence", "data")):
        assert verdicts[f"{section}, several devices, mesh.{axis}=2"] == "pass"


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    assert main(["audit", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["audit", str(tmp_path), "--texts", "1"]) == 2
    assert "texts=1 is too small; use 2" in capsys.readouterr().err
    assert main(["audit", str(demo_command.FOLDER), "--step", "3"]) == 2
    assert "holds exported weights, which are of one step" in capsys.readouterr().err
