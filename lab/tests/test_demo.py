"""The demo's figures, on few numbers."""

import json

from fwpkm_jax.cli import demo_command
from fwpkm_jax.interchange.weights_folder import open_run
from lab.study import demo
from tests.benchmarks.programs import run


def test_numbers_told_are_counted_and_others_are_not(capsys, monkeypatch):
    sizes = ("--sets", 1, "--told", 2, "--read", 100, 0, "--seed", 1)
    assert run("lab.study.demo", *sizes) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["bytes_read"] for line in lines] == [100, 0]
    assert all(line["asked"] == 6 and 2 <= line["right"] <= 6 for line in lines)
    facts = demo_command.FACTS
    swapped = dict(zip(facts, reversed(facts.values()), strict=True))
    monkeypatch.setattr(demo_command, "ask", lambda talk, name: swapped[name])
    shipped = open_run(demo_command.FOLDER)
    assert demo.right_answers(shipped, facts, [], told=1) == 0
    assert demo.right_answers(shipped, swapped, [], told=1) == 6
