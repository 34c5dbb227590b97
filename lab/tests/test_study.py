"""Every option of the programs behind lab/archive/study.md, on made-up runs and texts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.config import load_config
from fwpkm_jax.evaluation import Subject
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.state import init_state, model_graph
from lab.study import controls, figures, study
from tests.benchmarks.programs import result, result_lines, run


def test_wrong_answers_are_told_apart_by_how_they_begin():
    answers = ["123456", "129999", "199999", "654399", "654321", "659999", "129999"]
    others = 6 * [["654321", "777777"]] + [["128888"]]
    samples = [
        {"answer": answer, "expected": "123456", "exact": answer == "123456", "others": of}
        for answer, of in zip(answers, others, strict=True)
    ]
    found = figures.kinds_of_wrong(samples)
    # The last begins with two digits of both, and counts as one that began right.
    assert found == {"another": 3, "began_right": 2, "neither": 1}
    assert figures.kinds_of_wrong([samples[2] | {"others": []}])["neither"] == 1


def test_endings_of_a_name_add_options():
    longer = ["--training.steps", "800"]
    assert study.config_of("gdn_swa__fwpkm__pkm") == ("gdn_swa__fwpkm__pkm", [])
    assert study.config_of("gdn_swa__fwpkm__800") == ("gdn_swa__fwpkm", longer)
    opened = ["--model.fast_weight.gate_bias", "2"]
    assert study.config_of("gdn_swa__fwpkm__open") == ("gdn_swa__fwpkm", opened)
    both = "gdn_swa__fwpkm__ungated__800"
    assert study.config_of(both) == ("gdn_swa__fwpkm", [*study.WITHOUT_GATES, *longer])
    assert list(study.evaluations(both, has_memory=True)) == [
        *("ppl", "needle_1x", "needle_8x", "needle_1x_still", "needle_8x_still", "needle_15x"),
        *("needle_15x_still", "needle_frozen", "needle_reference", "ppl_reset", "ppl_ablated"),
        *("needle_reset", "needle_8x_reset", "needle_other", "continual"),
    ]


def test_runs_whose_slots_are_written_once_have_controls():
    opened = study.evaluations("gdn_swa__fwpkm__open", has_memory=True)
    assert {"ppl_reset", study.ABLATED, "needle_reset", study.OTHER} < set(opened)
    kind, far = opened["needle_8x_reset"]
    assert (kind, far.haystack_words, far.reset_memory_between_samples) == ("needle", (700,), True)
    for name in ("gdn_swa__fwpkm__ungated", "gdn_swa__pkm_fwpkm", "fa__fwpkm__pswa"):
        assert "needle_reset" in study.evaluations(name, has_memory=True)
    for name in ("gdn_swa__fwpkm__inner4", "gdn_swa__fwmlp", "lact"):
        assert "needle_reset" not in study.evaluations(name, has_memory=True)


def test_losses_of_one_book_give_no_interval(tmp_path):
    path = tmp_path / "ppl.npz"
    np.savez(path, loss_writing=np.ones(3), loss_frozen=np.ones(3), document=np.zeros(3, int))
    with pytest.raises(ValueError, match="has one document, which gives no interval"):
        figures._over(path, "document")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The study's folder, made up; commands that would train are noted in place of being run."""
    monkeypatch.setattr(study, "RUNS_DIR", tmp_path)
    monkeypatch.setattr(study, "EXCERPTS", tmp_path / "excerpts.jsonl")
    (tmp_path / "excerpts.jsonl").write_text("")
    noted = []
    training = SimpleNamespace(run=lambda command, check: noted.append(command))
    monkeypatch.setattr(study, "subprocess", training)
    return noted


def test_the_study_trains_and_evaluates_what_is_not_done(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "load_run", lambda directory: SimpleNamespace(memory={"layer": 0}))
    monkeypatch.setattr(study, "subject_of", lambda run, name: name)
    evaluated = []

    def run_suite(subject, names, *, directory, configs):
        evaluated.append(directory.name)
        directory.mkdir(parents=True)
        record = {"results": {"loss": [], "adaptation": -1.0, "forgetting": 0.5, "unseen": 0.25}}
        written = {"writing": {"all": {"perplexity": 5.0}}}
        records = {"continual": record, "needle": {"results": {"runs": []}}}
        if names == ("longbench",):
            answers = {"task": [0, 0, 1], "sample": [0, 1, 0], "loss_frozen": np.ones(3)}
            np.savez(directory / "longbench.npz", **answers, loss_writing=np.array([1, 0.5, 0]))
            both = {way: {"qasper": {"perplexity": 2.0}} for way in ("writing", "frozen")}
            records["longbench"] = {"results": both | {"tasks": {"qasper": {"samples": 3}}}}
        result = records.get(names[0], {"results": written})
        (directory / f"{names[0]}.json").write_text(json.dumps(result))

    monkeypatch.setattr(study, "run_suite", run_suite)
    monkeypatch.setattr(controls, "with_still_keys", lambda subject: f"{subject} still")
    monkeypatch.setattr(controls, "without_reads", lambda subject: f"{subject} ablated")
    monkeypatch.setattr(controls, "other_needles", lambda subject, **sizes: [])
    needle = SimpleNamespace(run=lambda subject, options, samples: "needle")
    monkeypatch.setattr(study, "EVALS", {"needle": needle})
    monkeypatch.setattr(
        study,
        "save_result",
        lambda found, directory: run_suite("", (found,), directory=directory, configs={}),
    )
    monkeypatch.setattr(study, "trained_loss", lambda directory: 1.5)
    monkeypatch.setattr(study, "tables", lambda lines, **names: ["table"])
    out = tmp_path / "lines.jsonl"
    names = ("gdn_swa__fwmlp:0", "gdn_swa__fwpkm__ungated:1", "gdn_swa__fwpkm__inner4:2")
    for _ in range(2):
        assert run("lab.study.study", "--runs", *names, "--no-tables", "--out", out) == 0
    every = ["ppl", "needle_1x", "needle_8x"]
    still = ["needle_1x_still", "needle_8x_still"]
    ungated = [
        *every,
        *still,
        "needle_15x",
        "needle_15x_still",
        "needle_frozen",
        "needle_reference",
    ]
    ungated += ["longbench", "ppl_reset", "ppl_ablated", "needle_reset", "needle_8x_reset"]
    ungated += ["needle_other", "continual"]
    fewer = [*every, "needle_frozen", "continual"]
    assert evaluated == [*fewer, *ungated, *fewer]
    first, second, third = runs
    assert first[1:5] == ["-m", "fwpkm_jax", "train", "lab/study/configs.py:gdn_swa__fwmlp"]
    assert first[first.index("--run_dir") + 1] == str(tmp_path / "gdn_swa__fwmlp_seed0")
    assert second[4] == "lab/study/configs.py:gdn_swa__fwpkm"
    assert second[-4:] == [*study.WITHOUT_GATES]
    assert third[4] == "lab/study/configs.py:gdn_swa__fwpkm"
    assert third[-2:] == ["--model.fast_weight.rule.inner_steps", "4"]
    lines = result_lines(out)
    assert [line["run"] for line in lines] == [*names]
    assert lines[0]["ppl"] == {"writing": 5.0}
    assert lines[0]["train_loss"] == 1.5
    assert lines[0]["environment"]["device"] == "cpu"
    assert lines[1]["longbench"]["tasks"] == {"qasper": [3, 2.0, 2.0]}
    mean, low, high = lines[1]["longbench"]["difference"]
    assert low < mean == -0.5 < high
    # A part of another run, whose line then has no more.
    part = tmp_path / "part.jsonl"
    run("lab.study.study", "--runs", "fa:0", "--evaluations", "needle_1x", "ppl", "--out", part)
    assert evaluated[-2:] == ["ppl", "needle_1x"]
    assert set(result(part)) == {"run", "train_loss", "ppl", "needle_1x", "environment"}
    with pytest.raises(SystemExit, match="no KIND:SEED"):
        run("lab.study.study", "--runs", "gdn:7", "--out", out)


def test_the_tables_show_the_lines(runs, tmp_path, capsys):
    losses = [[2.0] * len(study.DOMAINS)] * (len(study.DOMAINS) + 1)
    share = {"answers": 100, "accuracy": 0.25, "interval": [0.2, 0.3], "digits": 3.0}
    needles = [{"words": 56, "readings": readings, **share} for readings in (1, 4)]
    ppl = {"writing": 5.0, "frozen": 5.5, "difference": [-0.1, -0.2, 0.0]}
    gates = {"blocks_2": {"answers": {"mean": 0.7, "bytes": 4, "histogram": [1, 0] * 4 + [2, 0]}}}
    line = {
        "run": f"{study.MAIN}:0",
        "ppl": ppl | {"difference_over_books": [-0.1, -0.3, 0.1]},
        "ppl_reset": {"writing": 5.1},
        study.ABLATED: {"frozen": 5.2},
        "needle_1x": needles,
        "needle_reset": needles,
        study.OTHER: needles,
        "needle_reference": needles,
        "gates": gates,
        "longbench": {"tasks": {"qasper": [7, 3.0, 3.25]}, "difference": [-0.1, -0.2, 0.0]},
        "continual": {"loss": losses, "adaptation": -1.0, "forgetting": 0.5, "unseen": 0.25},
    }
    out = tmp_path / "lines.jsonl"
    out.write_text("".join(json.dumps(line | {"run": f"{study.MAIN}:{n}"}) + "\n" for n in (0, 1)))
    assert run("lab.study.study", "--tables", "--out", out) == 0
    assert not runs
    shown = capsys.readouterr().out
    changes = " | ".join(["0.000, 0.000"] * len(study.DOMAINS))
    for row in (
        f"| {study.MAIN} | 0 | {changes} | -1.0000 | 0.5000 | 0.2500 |",
        f"| {study.MAIN} | mean of 2 | 5.000 [5.000, 5.000] |",
        "| 0 | 5.000 | 5.100 | 5.500 | 5.200 | 0.25, 0.25 | 0.25, 0.25 | 0.25, 0.25 |",
        "| 0 | blocks_2 | answers | 4 | 0.70 | 0.75 |",
        f"| {study.MAIN} | 1 | 3.00, 3.25 | 7 | -0.1000 [-0.2000, 0.0000] |",
    ):
        assert row in shown


@pytest.fixture(scope="module")
def subject():
    """A model of the study with small tables, and text in which needles can be hidden."""
    experiment = load_config("lab/study/configs.py:gdn_swa__fwpkm")
    fast = replace(experiment.model.fast_weight, rule=FwPKM(num_subkeys=8, key_dim=16, value_dim=8))
    experiment = replace(experiment, model=replace(experiment.model, fast_weight=fast))
    state = init_state(
        experiment.model,
        memory=experiment.training.memory,
        optimizer=make_optimizer(experiment.optimizer, steps=1),
        seed=0,
    )
    model = nnx.merge(model_graph(experiment.model), state.params)
    memory = jax.tree.map(lambda x: x + 1.0, state.memory)
    return Subject(
        model=model, memory=memory, data=experiment.data, lifetime="carried", groups=8, batch_size=8
    )


def test_a_memory_without_reads_has_no_values(subject):
    ablated = controls.without_reads(subject)
    (before,), (after,) = subject.memory.values(), ablated.memory.values()
    assert np.any(before.values)
    assert not np.any(after.values)
    np.testing.assert_array_equal(after.keys, before.keys)
    fast = replace(subject.model.config.fast_weight, rule=FwMLP())
    other = replace(subject, model=SimpleNamespace(config=SimpleNamespace(fast_weight=fast)))
    with pytest.raises(ValueError, match="FwMLP"):
        controls.without_reads(other)
    with pytest.raises(ValueError, match="FwMLP"):
        controls.with_still_keys(other)


@pytest.mark.slow
def test_a_memory_with_still_keys_moves_its_values_alone(subject):
    text = jax.random.randint(jax.random.key(0), (1, 200), 32, 127)
    for one, moved in ((subject, True), (controls.with_still_keys(subject), False)):
        start = jax.tree.map(lambda x: x[:1], one.memory)
        _, memory, *_ = one.model(text, start)
        (before,), (after,) = start.values(), memory.values()
        assert bool(np.any(before.values != after.values))
        assert bool(np.any(before.keys != after.keys)) == moved


def test_needles_in_other_words_keep_keys_and_answers(subject):
    samples = controls.other_needles(subject, words=56, samples=3)
    assert len(samples) == 3
    for sample in samples:
        assert "secret number" not in sample.haystack + sample.question
        target = sample.needles[sample.target]
        question = controls.OTHER_QUESTION.format(key=target.key)
        assert sample.question == f" {question}"
        assert f"{question}{sample.answer}." in sample.haystack


def test_gates_are_counted_at_the_digits_of_needles(subject):
    (found,) = controls.gates_at_needles(subject, rows=2).values()
    mix = subject.text.needles
    digits = 2 * mix.num_needles * mix.value_digits
    assert found["stated"]["bytes"] == found["answers"]["bytes"] == digits
    assert sum(place["bytes"] for place in found.values()) == 2 * subject.text.length
    for place in found.values():
        assert sum(place["histogram"]) == place["bytes"]
        assert 0 < place["mean"] < 1
