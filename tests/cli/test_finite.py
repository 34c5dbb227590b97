"""Evaluations and texts of a model that is not finite end with one line."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation.readers.finite import NONE, likeliest, require_finite
from fwpkm_jax.interchange import Weights
from fwpkm_jax.run.conversation import Conversation
from fwpkm_jax.run.load import Run


def test_the_likeliest_token_of_what_is_not_finite_is_none():
    logits = jnp.asarray([[0.0, 2, 1], [0, jnp.nan, 1], [0, jnp.inf, 1], [-jnp.inf, 1, 0]])
    np.testing.assert_array_equal(likeliest(logits), [1, NONE, NONE, 1])
    losses = np.asarray([1.0, 2])
    assert require_finite(losses, where="a") is losses
    with pytest.raises(ValueError, match="a: 1 of 3 log probabilities are not finite"):
        require_finite(np.asarray([1.0, np.nan, 2]), where="a")


def not_finite(run: Run) -> Run:
    """A run one slow weight of which has become NaN."""
    named = Weights(run.params, run.memory).named()
    name = next(name for name in named if name.endswith("embedding"))
    changed = Weights(run.params, run.memory).replaced(
        named | {name: jnp.full_like(named[name], jnp.nan)}
    )
    return run._replace(params=changed.params)


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def broken(text_run, monkeypatch):
    run = not_finite(text_run)
    monkeypatch.setattr("fwpkm_jax.cli.conversation_options.load_run", lambda *_, **options: run)
    monkeypatch.setattr("fwpkm_jax.run.evaluate.load_run", lambda *_, **options: run)
    return run


@pytest.mark.thorough
def test_a_text_of_weights_that_are_not_finite_ends_with_one_line(broken, capsys, tmp_path):
    with Conversation(broken) as talk, pytest.raises(ValueError, match="are not finite"):
        list(talk.answer(np.asarray([65, 66]), max_new_tokens=5))
    with Conversation(broken) as talk, pytest.raises(ValueError, match="are not finite"):
        talk.answer_aside(np.asarray([65, 66]), max_new_tokens=5)
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "log probabilities of token 1 are not finite" in one_line(capsys)


@pytest.mark.slow
def test_an_evaluation_of_weights_that_are_not_finite_ends_with_one_line(
    broken, capsys, monkeypatch, tmp_path
):
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 200)
    data = TextData(train_paths=(str(text),), valid_paths=(str(text),))
    experiment = dataclasses.replace(broken.experiment, data=data)
    run = broken._replace(experiment=experiment)
    monkeypatch.setattr("fwpkm_jax.run.evaluate.load_run", lambda *_, **options: run)
    for suite in ("ppl", "needle"):
        arguments = [str(tmp_path), "--suite", suite, "--limit", "1"]
        assert main(["eval", *arguments, "--needle.haystack_words", "100"]) == 2
        assert "not finite. The run's weights" in one_line(capsys)
    assert not list(tmp_path.glob("results/*.json"))
