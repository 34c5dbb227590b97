"""The report of a run directory: complete, self-contained, and clear about what is missing."""

import html
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.config import Experiment
from fwpkm_jax.data import NeedleMix, RecallData, TextData
from fwpkm_jax.evaluation import EVALS
from fwpkm_jax.evaluation.display.html import image
from fwpkm_jax.evaluation.display.plot_style import DPI, new_figure, save_figure
from fwpkm_jax.evaluation.report import training, words, write_report
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.rules import SDM, FwPKM
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig
from tests.evaluation.conftest import tiny_model_config
from tests.evaluation.display.test_plots import recall_record, share

PROVENANCE = {"checkpoint": {"run": "runs/<x>", "step": 20}, "seed": 7, "scored_tokens": 160}


def result(right: int) -> dict:
    record = recall_record(right)
    for scores in (record["results"]["writing"], record["results"]["frozen"]):
        scores |= {"beyond_window": scores["all"], "beyond_reach": share(0, 4)}
    record["results"]["writing"]["beyond_reach"] = None
    return {"evaluation": "recall", "provenance": PROVENANCE, "config": {"num_bins": 4}} | record


def write_json(path: Path, values: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    experiment = Experiment(
        model=tiny_model_config(), data=RecallData(), training=TrainingConfig(steps=20)
    )
    run = tmp_path / "my <run>"
    write_json(run / "config.json", experiment.to_json())
    return run


def train(run: Path) -> None:
    lines = [
        {"step": step, "loss": 3 - step / 20, "layer_1/memory_loss": 0.5, "layer_1/gate_mean": 0.25}
        for step in range(1, 21)
    ]
    lines[9]["loss"] = None
    lines[19]["valid/loss"] = 1.875
    text = "\n".join(map(json.dumps, lines))
    (run / "metrics.jsonl").write_text(text + '\n{"step": 21, "lo')  # Cut off while written.
    write_json(run / "results.json", {"parameters": 8024, "memory_parameters": 192})


@pytest.mark.thorough
def test_everything_is_in_one_file_that_loads_nothing(run):
    train(run)
    write_json(run / "results" / "recall.json", result(39))
    page = write_report(run).read_text()
    assert page.count('src="data:image/png;base64,') == 4  # Recall; loss, memory loss, use.
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<script" not in page
    assert "my &lt;run&gt;" in page
    assert "my <run>" not in page
    assert "8,024 parameters and 192 numbers of memory" in page
    assert "1.875 at the end" in page
    assert "Of 160 facts further away than one layer" in page
    assert "97.5% were answered right with the memory writing" in page
    assert EVALS["recall"].table(result(39)).splitlines()[0] in page
    for name, value in (("checkpoint.step", "20"), ("seed", "7"), ("option num_bins", "4")):
        assert f"<td>{name}</td><td>{value}</td>" in page
    assert "<td>model.fast_weight.rule.top_k</td><td>2</td>" in page


@pytest.mark.thorough
def test_the_result_comes_first_and_what_explains_it_is_folded(run):
    train(run)
    write_json(run / "results" / "recall.json", result(39))
    page = write_report(run).read_text()
    order = ("Of 160 facts", "What the words mean", "8,024 parameters", "1.875 at", "come from")
    places = [page.rindex(text) for text in order]
    assert places == sorted(places)
    assert "<h2>" in page[: places[0]]
    assert "<details open" not in page


@pytest.mark.slow
def test_only_what_scrolls_by_itself_can_be_wider_than_the_screen(run):
    train(run)
    write_json(run / "results" / "recall.json", result(39))
    page = write_report(run).read_text()
    assert '<meta name="viewport" content="width=device-width' in page
    assert page.count("<table") == page.count('<div class="wide"><table')
    assert "pre { font-size: .85rem; overflow-x: auto; }" in page


@pytest.mark.slow
def test_a_command_can_be_pasted_and_a_pair_of_plots_read_on_a_phone(run, tmp_path):
    train(run)
    session = {
        **{"from_step": 0, "started": "now", "commit": None, "device_count": 1},
        **{"device_kind": "cpu", "versions": {}},
        "command": ["/env/bin/fwpkm", "train", "--data.train_paths", "my books", "it's"],
    }
    write_json(run / "environment.json", {"fingerprint": "0", "sessions": [session]})
    page = write_report(run).read_text()
    (shown,) = re.findall(r'<pre class="command">(.*?)</pre>', page)
    assert shlex.split(html.unescape(shown)) == session["command"]
    assert ".command { white-space: pre-wrap;" in page
    for inches in (6, 10):  # One plot, and two side by side.
        path = save_figure(new_figure(inches, 3)[0], tmp_path / "plot.png")
        markup = image(path, description="", dpi=DPI)
        assert ('class="broad"' in markup) == (inches == 10)
    assert "img.broad { max-width: none; }" in page


def test_a_memory_that_is_written_at_every_token_is_described_so():
    block = FastWeightConfig(rule=SDM.tiny())
    model = tiny_model_config(vocab_size=257, memory_layers=(0,), fast_weight=block)
    config = Experiment(model=model, data=TextData(train_paths=("book.txt",)))
    said = words.describe_model(config.to_json(), None)
    assert "of 16 slots, 6 of them read by each token, written at every token (SDM)" in said


@pytest.mark.parametrize("gate", ["gate_output", "gate_residual", None])
def test_a_run_with_needles_tells_how_its_losses_differ_and_whether_the_gate_matters(gate):
    needles = NeedleMix(share=0.75, num_needles=3, answer_weight=16.0)
    data = TextData(train_paths=("book.txt",), length=512, needles=needles)
    gates = {name: name == gate for name in ("gate_output", "gate_residual")}
    block = FastWeightConfig(rule=FwPKM(num_subkeys=8, key_dim=8, value_dim=8), **gates)
    model = tiny_model_config(vocab_size=257, memory_layers=(0,), fast_weight=block)
    memory = MemoryConfig(groups=4, lifetime="carried")
    training = TrainingConfig(steps=20, batch_size=8, memory=memory)
    config = Experiment(model=model, data=data, training=training).to_json()
    task = words.describe_task(config)
    assert "75% hold 3 sentences with a number" in task
    assert "weigh 16 times as much" in task
    assert "Every 2 sequences of a batch had a memory of its own, carried" in task
    assert ("the gate does not limit it" in words.describe_model(config, None)) == (gate is None)
    silent = {**config["data"]["needles"], "sentence_weight": 0.0}
    for mix, said in ((None, False), (config["data"]["needles"], False), (silent, True)):
        other = words.describe_task({**config, "data": {**config["data"], "needles": mix}})
        assert ("the rest of these sentences nothing" in other) == said
    plain = {**config, "data": {**config["data"], "needles": None}}
    assert "sentences" not in words.describe_task(plain)


def test_a_new_run_says_what_is_still_missing(run):
    page = write_report(run).read_text()
    assert "has not finished" in page
    assert "no metrics.jsonl" in page
    assert "There are no results yet" in page


def test_a_result_of_another_version_is_explained_and_the_others_shown(run):
    old = result(39)
    del old["results"]["chance"]
    write_json(run / "results" / "recall.json", old)
    write_json(run / "results" / "other.json", {"evaluation": "other"})
    page = write_report(run).read_text()
    assert "has no &#x27;chance&#x27;" in page
    assert "fwpkm eval RUN --suite recall replaces it" in page


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        write_report(tmp_path)


def test_a_long_curve_is_averaged_and_a_short_one_is_not():
    drawn = []
    axes = type("Axes", (), {"plot": lambda self, x, y, **_: drawn.append((x, y))})()
    steps = np.arange(1, 1001)
    training._line(axes, training.Curve(steps, steps / 10.0), "black", None)
    training._line(axes, training.Curve(steps[:200], steps[:200] / 10.0), "black", None)
    assert len(drawn[0][0]) == 200
    np.testing.assert_allclose(drawn[0][1], np.array(drawn[0][0]) / 10)
    assert drawn[0][0][0] == 3  # The middle of the first five steps.
    assert drawn[1][0] == list(range(1, 201))


MALFORMED = {
    "results/recall.json": [
        "[1]", "{", '{"evaluation": "recall"}', '{"evaluation": ["recall"]}', "[" * 10**5,
        '{"evaluation": "recall", "results": {"writing": 5}, "provenance": 3, "config": null}',
        '{"evaluation": "recall", "results": null, "note": "\\ud800"}',
    ],
    "results.json": ["[1]", '{"parameters": "many"}', '{"parameters": {}}'],
    "environment.json": ["[]", '{"sessions": 5}', '{"sessions": [{}]}', '{"sessions": [null]}'],
    "config.json": ["[]", '{"model": 5}', '{"model": {}, "data": [], "training": null}'],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.slow_cases("environment.json")
@pytest.mark.parametrize("name", MALFORMED)
def test_files_of_another_form_are_named_in_one_line_and_other_results_shown(run, capsys, name):
    train(run)
    write_json(run / "results" / "recall.json", result(39))
    whole = (run / name).read_text() if (run / name).is_file() else None
    for content in MALFORMED[name]:
        (run / name).write_text(content)
        code = main(["report", str(run)])
        said = [line for line in capsys.readouterr().err.splitlines() if "WARNING" not in line]
        if name.startswith("results/"):
            assert code == 0
        else:
            assert code == 2
            assert len(said) == 1
            assert f"{run / name} " in said[0], said
    if whole is not None:
        (run / name).write_text(whole)
        assert main(["report", str(run)]) == 0


def test_lines_of_the_log_that_are_no_records_of_numbers_are_left_out(run):
    train(run)
    path = run / "metrics.jsonl"
    hostile = ["[]", "5", '{"step": "a", "loss": 1}', '{"step": 3, "loss": [1]}', "[" * 10**5]
    hostile += [
        '{"step": 3, "loss": 1e308}',
        '{"loss": 2}',
        '{"step": 4, "layer_x/memory_loss": 1}',
    ]
    expected = training.read_metrics(path)["loss"]
    path.write_text("\n".join([*hostile, path.read_text()]))
    found = training.read_metrics(path)
    np.testing.assert_array_equal(found["loss"].steps, expected.steps)
    np.testing.assert_array_equal(found["loss"].values, expected.values)
    assert write_report(run).is_file()
