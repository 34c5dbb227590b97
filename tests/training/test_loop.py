"""A whole run: the files it writes, and that stopping and resuming does not change results."""

import dataclasses
import io
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.data import RecallData
from fwpkm_jax.run import load_run
from fwpkm_jax.run.log import RunLog
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from tests.training.conftest import read_records


def replace(experiment, run_dir, **training):
    return dataclasses.replace(
        experiment,
        run_dir=str(run_dir),
        training=dataclasses.replace(experiment.training, **training),
    )


def assert_same_state(actual, expected):
    assert int(actual.step) == int(expected.step)
    for a, e in zip(jax.tree.leaves(actual[1:4]), jax.tree.leaves(expected[1:4]), strict=True):
        np.testing.assert_array_equal(a, e)


def interrupt(number):
    """A validation that stops the run it is called from."""

    def validate(model, memory):
        signal.raise_signal(number)
        return {"loss": 1.0}

    return validate


@pytest.mark.thorough
def test_run_directory_tells_everything_about_the_run(unbroken):
    directory, result = unbroken.directory, unbroken.result
    assert result.status == "finished"
    assert json.loads((directory / "config.json").read_text()) == unbroken.experiment.to_json()
    environment = json.loads((directory / "environment.json").read_text())
    assert environment["fingerprint"] == unbroken.experiment.fingerprint
    (session,) = environment["sessions"]
    assert session["versions"]["jax"] == jax.__version__
    assert session["device_kind"] == jax.devices()[0].device_kind
    results = json.loads((directory / "results.json").read_text())
    assert results == result.results
    assert results["steps"] == 20
    assert results["session"]["compile_seconds"] > 0
    assert results["parameters"] == sum(x.size for x in jax.tree.leaves(result.state.params))
    assert list((directory / "tensorboard").glob("events*"))
    assert checkpoint_steps(directory / "checkpoints") == [10, 15, 20]


@pytest.mark.thorough
def test_every_step_has_one_record(unbroken):
    records = read_records(unbroken.directory)
    assert [record["step"] for record in records] == list(range(1, 21))
    for record in records:
        assert {"loss", "grad_norm", "param_norm", "lr", "layer_1/memory_loss"} <= record.keys()
        assert None not in record.values()
    assert [record["step"] for record in records if "valid/loss" in record] == [20]
    assert records[-1]["valid/loss"] == unbroken.result.results["validation"]["loss"]


@pytest.mark.thorough
def test_plain_lines_come_every_log_every_steps(unbroken):
    lines = unbroken.printed.splitlines()
    assert [line.split()[1] for line in lines if " ETA " in line] == ["10/20", "20/20"]
    assert "\r" not in unbroken.printed
    assert "\x1b" not in unbroken.printed
    sizes = dict(re.findall(r"(takes|params|optimizer) ([0-9.]+) kB", lines[0]))
    numbers = sum(x.size for x in jax.tree.leaves(unbroken.result.state.params))
    assert lines[0].startswith("A checkpoint takes ")
    assert float(sizes["params"]) == pytest.approx(4 * numbers / 1000, rel=0.01)
    assert float(sizes["optimizer"]) == pytest.approx(8 * numbers / 1000, rel=0.01)  # Two moments.
    assert float(sizes["params"]) + float(sizes["optimizer"]) < float(sizes["takes"]) < 100
    assert lines[0].endswith("B are free.")
    step = dict(re.findall(r"(takes|params|memory|gradients|activations) ([0-9.]+) kB", lines[1]))
    assert lines[1].startswith("By estimate a step takes ")
    assert step["params"] == step["gradients"] == sizes["params"]
    assert float(step["activations"]) > 0
    assert lines[2] == "Compiling the training step ..."
    assert lines[3].startswith("Compiled the training step in")


@pytest.mark.thorough
def test_training_lowers_the_loss(unbroken):
    losses = [record["loss"] for record in read_records(unbroken.directory)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1


@pytest.mark.thorough("2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_the_same_command_goes_on(
    unbroken, tmp_path, number, monkeypatch
):
    monkeypatch.setattr(RecallData, "validates_on", "Validation reads these facts.")
    # Step 7 is no multiple of checkpoint.every, so it is the signal that saves it.
    experiment = replace(unbroken.experiment, tmp_path / "run", validate_every=7)
    handler = signal.getsignal(number)
    first = train(experiment, validate=interrupt(number), stream=io.StringIO())
    assert (first.status, first.step, first.signal) == ("interrupted", 7, number)
    assert not (tmp_path / "run" / "results.json").exists()
    assert signal.getsignal(number) == handler

    stream = io.StringIO()
    experiment = replace(unbroken.experiment, tmp_path / "run")
    second = train(experiment, stream=stream)
    said = stream.getvalue().splitlines()
    resuming = next(at for at, line in enumerate(said) if line.endswith(" at step 7."))
    assert said[resuming + 1 : resuming + 3] == [
        "Validation reads these facts.",
        "Compiling the training step ...",
    ]
    assert_same_state(second.state, unbroken.result.state)
    records = read_records(tmp_path / "run")
    assert records[6].pop("valid/loss") == 1.0
    assert records == read_records(unbroken.directory)
    sessions = json.loads((tmp_path / "run" / "environment.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 7]


@pytest.mark.slow
def test_records_past_the_checkpoint_are_written_once(unbroken, tmp_path):
    # A run killed at step 13 has its checkpoint of step 10, records of 3 more and half of a fourth.
    experiment = replace(unbroken.experiment, tmp_path / "run", validate_every=10)
    train(experiment, validate=interrupt(signal.SIGTERM), stream=io.StringIO())
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        for step in (11, 12, 13):
            file.write(json.dumps({"step": step, "loss": -1.0}) + "\n")
        file.write('{"step": 14, "lo')
    train(replace(unbroken.experiment, tmp_path / "run"), stream=io.StringIO())
    records = read_records(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 21))
    assert records[10:] == read_records(unbroken.directory)[10:]


@pytest.mark.thorough
def test_a_finished_run_is_left_as_it_is(unbroken):
    before = (unbroken.directory / "metrics.jsonl").read_bytes()
    stream = io.StringIO()
    result = train(unbroken.experiment, stream=stream)
    assert (result.status, result.step) == ("finished", 20)
    assert result.results == unbroken.result.results
    assert "has finished its 20 steps" in stream.getvalue()
    assert (unbroken.directory / "metrics.jsonl").read_bytes() == before


@pytest.mark.thorough
def test_another_configuration_is_refused_and_the_fields_named(unbroken):
    other = dataclasses.replace(
        replace(unbroken.experiment, unbroken.directory, batch_size=8, log_every=3), seed=5
    )
    with pytest.raises(ValueError, match="another configuration") as error:
        train(other, stream=io.StringIO())
    assert "seed: 0 -> 5" in str(error.value)
    assert "training.batch_size: 4 -> 8" in str(error.value)
    assert "log_every" not in str(error.value)
    assert "--run_dir" in str(error.value)


@pytest.mark.thorough
def test_fewer_steps_than_done_are_refused(unbroken):
    fewer = replace(unbroken.experiment, unbroken.directory, steps=12)
    with pytest.raises(ValueError, match=r"training\.steps=12.* has 20 steps done"):
        train(fewer, stream=io.StringIO())


@pytest.mark.thorough
def test_the_schedule_that_a_run_began_with_may_be_kept(unbroken, tmp_path):
    (tmp_path / "config.json").write_text((unbroken.directory / "config.json").read_text())
    longer = replace(unbroken.experiment, tmp_path, steps=30)

    def claim(decay_steps):
        optimizer = dataclasses.replace(longer.optimizer, decay_steps=decay_steps)
        with RunLog(dataclasses.replace(longer, optimizer=optimizer), stream=io.StringIO()) as log:
            log.claim()

    claim(None)
    claim(20)
    with pytest.raises(ValueError, match=r"optimizer.decay_steps"):
        claim(25)


@pytest.mark.slow
def test_more_steps_continue_a_finished_run(unbroken, tmp_path):
    # With the decay's end fixed, ten steps and ten more are twenty.
    optimizer = dataclasses.replace(unbroken.experiment.optimizer, decay_steps=20)
    experiment = dataclasses.replace(unbroken.experiment, optimizer=optimizer)
    train(replace(experiment, tmp_path / "run", steps=10), stream=io.StringIO())
    result = train(replace(experiment, tmp_path / "run", steps=20), stream=io.StringIO())
    assert_same_state(result.state, unbroken.result.state)


@pytest.mark.thorough
def test_a_directory_with_other_files_is_refused(unbroken, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no config\.json.*--run_dir"):
        train(replace(unbroken.experiment, tmp_path), stream=io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.thorough
def test_a_vocabulary_smaller_than_the_datas_is_refused(unbroken, tmp_path):
    model = dataclasses.replace(unbroken.experiment.model, vocab_size=5)
    experiment = dataclasses.replace(unbroken.experiment, model=model, run_dir=str(tmp_path / "x"))
    with pytest.raises(ValueError, match=r"model\.vocab_size=5.*raise it to 12"):
        train(experiment, stream=io.StringIO())
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_run_opens_for_reading(unbroken):
    run = load_run(unbroken.directory)
    assert run.experiment == unbroken.experiment
    assert run.step == 20
    state = unbroken.result.state
    for loaded, trained in ((run.params, state.params), (run.memory, state.memory)):
        jax.tree.map(np.testing.assert_array_equal, loaded, trained)
    tokens = jnp.zeros((2, 16), jnp.int32)
    logits = jax.eval_shape(run.model, tokens, run.memory).logits
    assert logits.shape == (2, 16, run.experiment.model.vocab_size)
    assert load_run(unbroken.directory, "best").step == 20  # The only one validated.
    assert load_run(unbroken.directory, 15).step == 15
    with pytest.raises(FileNotFoundError, match=r"step 5 .*: 10, 15, 20"):
        load_run(unbroken.directory, 5)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load_run(unbroken.directory / "checkpoints")
