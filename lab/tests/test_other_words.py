"""Needles in other words: how answers are counted, on planted logits and a tiny run."""

import dataclasses
import json

import numpy as np
import pytest

from fwpkm_jax.data import TextData, load_tokenizer, needle_question, needle_sentence
from fwpkm_jax.evaluation.needle.samples import Needle, NeedleSample
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from lab.study import controls, other_words
from tests.benchmarks.programs import result_lines, run
from tests.training.tiny_config import get_config


def sample(value):
    needle = Needle("12ab", value, 0.0, 0)
    text, question = needle_sentence("12ab", value), f" {needle_question('12ab')}"
    return NeedleSample(text, question, value, (needle,), 0, "", 1)


@pytest.mark.parametrize("words", other_words.WORDS.values())
def test_a_sample_in_other_words_states_and_asks_in_them(words):
    found = controls.in_other_words(sample("123456"), words)
    said = words.format(key="12ab")
    assert found.haystack == f"{said}123456."
    assert found.question == f" {said}"
    assert found.answer == "123456"


def test_a_digit_is_chosen_among_the_ten_and_a_free_answer_among_all_bytes(monkeypatch):
    tokenizer = load_tokenizer("bytes")

    def logits(model, tokens, memory):
        """The next byte is the likeliest but for one place of the first row, where a letter is."""
        found = np.zeros((*tokens.shape, 257))
        for row, place in np.ndindex(tokens.shape[0], tokens.shape[1] - 1):
            found[row, place, tokens[row, place + 1]] = 1.0
        at = len(sample("").question)
        found[0, at, ord("x")] = 2.0  # The second digit's place, where the digit comes second.
        found[1, at - 1, ord("9")] = 2.0  # The first digit's, where another digit comes first.
        return found

    monkeypatch.setattr(other_words, "_logits", logits)
    asked = [sample("123456"), sample("234567"), sample("345678")]
    exact, digits = other_words.answers(None, None, tokenizer, asked)
    assert exact == [False, False, True]
    assert digits == [[1] * 6, [0, 1, 1, 1, 1, 1], [1] * 6]


def test_a_tiny_run_is_asked_in_every_wording_and_once_without_reading(tmp_path, monkeypatch):
    books = tmp_path / "books.jsonl"
    books.write_text(json.dumps({"text": "abcd efg " * 60}) + "\n")
    experiment = get_config()
    model = dataclasses.replace(experiment.model, vocab_size=257)
    data = TextData(length=16, train_paths=(str(books),), valid_paths=(str(books),))
    experiment = dataclasses.replace(experiment, model=model, data=data)
    state = init_state(model, memory=experiment.training.memory, optimizer=None, seed=0)
    made_up = Run(experiment, model_graph(model), state.params, state.memory, 0)
    monkeypatch.setattr(other_words, "load_run", lambda path: made_up)
    few = ("--samples", 2, "--haystack-words", 8, "--readings", 1)
    out = tmp_path / "lines.jsonl"
    run("lab.study.other_words", "--runs", tmp_path / "tiny", *few, "--out", out)
    lines = result_lines(out)
    expected = [*((words, 1) for words in other_words.WORDS), ("of training", 0)]
    assert [(line["words"], line["readings"]) for line in lines] == expected
    for line in lines:
        assert (line["run"], line["samples"], len(line["digits"])) == ("tiny", 2, 6)
        assert all(0 <= right <= 2 for right in (line["exact"], *line["digits"]))
