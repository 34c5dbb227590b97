"""Both in the decoder: training, resuming, devices, evaluation, streams, decoding."""

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from own_memory import Hebbian

from fwpkm_jax.generation import generate, init_generation
from fwpkm_jax.run.load import load_run

TINY = Path(__file__).parents[1] / "tiny.py"


def test_it_trains_from_the_command_line_and_reports_the_rules_own_measure(trained, losses):
    found = losses(trained)
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(loss) for loss in found.values())
    assert found[6] < found[1]
    text = (trained / "metrics.jsonl").read_text()
    assert "association" in text  # The field of HebbianInfo.
    config = json.loads((trained / "config.json").read_text())
    assert config["plugins"] == ["own_memory"]


def test_a_shipped_config_takes_both_by_name(fwpkm, tmp_path, losses):
    sizes = "--training.steps 1 --training.batch_size 4 --training.memory.groups 4"
    fwpkm(
        *("train", "recall", "--plugins", "own_memory", "--run_dir", tmp_path / "run"),
        *("--model.mixers", "moving_average", "moving_average"),
        *sizes.split(),
    )
    assert math.isfinite(losses(tmp_path / "run")[1])


def test_a_run_that_lost_its_last_steps_ends_as_the_unbroken_one(fwpkm, trained, losses, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(trained, directory)
    shutil.rmtree(directory / "checkpoints" / "6")  # As if it had been stopped after step 3.
    fwpkm("train", "--resume", directory, "--plugins", "own_memory")
    assert (directory / "checkpoints" / "6").exists()
    assert losses(directory) == losses(trained)


def test_eight_devices_train_as_one(fwpkm, trained, losses, tmp_path):
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.model", "2"]
    fwpkm("train", TINY, "--run_dir", tmp_path / "run", *mesh, devices=8)
    ours, expected = losses(tmp_path / "run"), losses(trained)
    assert ours.keys() == expected.keys()
    for step, loss in expected.items():
        assert ours[step] == pytest.approx(loss, rel=1e-4)


def test_it_is_evaluated(fwpkm, trained):
    assert "all answers" in fwpkm("eval", trained, "--limit", 1, "--plugins", "own_memory")
    assert (trained / "results" / "report.html").exists()


def test_a_checkpoint_holds_the_written_memory(trained):
    run = load_run(trained)
    assert run.experiment.model.fast_weight.rule == Hebbian(key_dim=8, value_dim=8)
    (memory,) = jax.tree.leaves(run.memory)
    assert memory.shape == (8, 8, 8)
    assert np.any(np.asarray(memory) != 0)


def test_a_stream_in_pieces_equals_the_stream_token_by_token(trained):
    run = load_run(trained)
    tokens = np.random.default_rng(0).integers(4, 16, size=(8, 24))
    piece = jax.jit(lambda tokens, stream: run.model.stream(tokens, stream))

    def stream(lengths):
        state, logits, start = run.model.init_stream(run.memory, batch=8, max_length=24), [], 0
        for length in lengths:
            out = piece(tokens[:, start : start + length], state)
            logits.append(np.asarray(out.logits))
            state, start = out.stream, start + length
        return np.concatenate(logits, axis=1), state.memory

    one, pieces = stream([1] * 24), stream([11, 13])
    np.testing.assert_allclose(pieces[0], one[0], rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), pieces, one)


def test_it_decodes(trained):
    run = load_run(trained)
    prompts = np.random.default_rng(0).integers(4, 16, size=(8, 5))
    state = init_generation(run.model, run.memory, batch=8, max_length=16)
    out = generate(run.model, prompts, state, max_new_tokens=4)
    assert out.tokens.shape == (8, 4)
    vocab_size = run.experiment.model.vocab_size
    assert np.all((np.asarray(out.tokens) >= 0) & (np.asarray(out.tokens) < vocab_size))
