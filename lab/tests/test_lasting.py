"""The programs about saved memories, at tiny sizes."""

import dataclasses
import json

import numpy as np
import pytest

from fwpkm_jax.data import RecallData, TextData, load_tokenizer
from fwpkm_jax.run import Run
from fwpkm_jax.training.state import init_state, model_graph
from lab.study import lasting, lasting_text
from tests.benchmarks.programs import result, run
from tests.training.tiny_config import get_config


def test_other_texts_state_other_facts_only():
    data = RecallData(length=64, num_facts=4, num_keys=16, num_values=8, min_distance=16)
    facts = lasting.Facts(data, people=3, seed=0)
    questions, asked = facts.questions()
    told = facts.told()
    for row in range(3):
        pairs = dict(zip(questions[row, asked], questions[row, asked + 1], strict=True))
        assert len(pairs) == 4
        at = np.flatnonzero(np.isin(told[row], list(pairs)))
        assert {told[row, i]: told[row, i + 1] for i in at} == pairs
        assert at.max() < told.shape[1] // 2
        filler, other, same = (facts.other(kind)[row] for kind in lasting.KINDS)
        assert filler.max() < data.first_key
        keys = other[(other >= data.first_key) & (other < data.first_value)]
        assert len(set(keys)) == 4
        assert not set(keys) & set(pairs)
        assert set(same[(same >= data.first_key) & (same < data.first_value)]) == set(pairs)


def test_people_can_be_told_more_facts_than_a_training_document_has():
    trained = RecallData(length=64, num_facts=4, num_keys=16, num_values=8, min_distance=16)
    assert lasting.task(trained, None) == trained
    data = lasting.task(trained, 8)
    told = lasting.Facts(data, people=2, seed=0).told()
    assert told.shape == (2, 32)
    assert data.vocab_size == trained.vocab_size
    for row in told:
        assert len(set(row[(row >= data.first_key) & (row < data.first_value)])) == 8
    with pytest.raises(ValueError, match="facts=9 needs 18 keys"):
        lasting.task(trained, 9)


@pytest.mark.thorough
def test_the_curve_has_a_point_for_each_conversation(tmp_path, monkeypatch, capsys):
    experiment = get_config()
    state = init_state(experiment.model, memory=experiment.training.memory, optimizer=None, seed=0)
    made_up = Run(experiment, model_graph(experiment.model), state.params, state.memory, 0)
    monkeypatch.setattr(lasting, "load_run", lambda _: made_up)
    out = tmp_path / "lasting.json"
    options = ("--people", 2, "--facts", 2, "--conversations", 2, "--seed", 1, "--out", out)
    run("lab.study.lasting", "--run", "runs/made_up", *options)
    rows = result(out)["rows"]
    assert [(row["text"], row["conversations"]) for row in rows] == [
        (kind, number) for kind in lasting.KINDS for number in (-1, 0, 1, 2)
    ]
    assert all(0 <= row["recall"] <= 1 for row in rows)
    assert all(row["kilobytes_per_person"] > 0 for row in rows)
    assert "| conversations since | before | 0 | 1 | 2 |" in capsys.readouterr().out


@pytest.fixture
def books(tmp_path):
    """An experiment on two books that share no letter."""
    path = tmp_path / "books.jsonl"
    texts = ("abcd efg " * 20, "xyz uvw " * 20)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    experiment = get_config()
    model = dataclasses.replace(experiment.model, vocab_size=257)
    data = TextData(length=16, train_paths=(str(path),), valid_paths=(str(path),))
    return dataclasses.replace(experiment, model=model, data=data)


def test_later_conversations_are_about_other_books(books):
    options = lasting_text.Options(people=3, words=8, asked=(0, 2), length=20)
    tokenizer = load_tokenizer("bytes")
    texts = lasting_text.texts_for(books.data, tokenizer, options)
    assert texts.later.shape == (2, 3, 20)
    assert set(texts.later.ravel()) <= set(b"xyz uvw ")
    for told, sample in zip(texts.told, texts.samples, strict=True):
        assert tokenizer.decode(told) == sample.haystack
        assert all(needle.sentence in sample.haystack for needle in sample.needles)
    with pytest.raises(ValueError, match="3 haystacks and 160 tokens"):
        lasting_text.texts_for(books.data, tokenizer, dataclasses.replace(options, length=27))


@pytest.mark.thorough
def test_facts_in_text_are_asked_at_each_number(books, tmp_path, monkeypatch, capsys):
    state = init_state(books.model, memory=books.training.memory, optimizer=None, seed=0)
    made_up = Run(books, model_graph(books.model), state.params, state.memory, 0)
    monkeypatch.setattr(lasting_text, "load_run", lambda _: made_up)
    out = tmp_path / "text.json"
    sizes = ("--people", 2, "--words", 8, "--readings", 2, "--asked", 0, 2, "--length", 20)
    run("lab.study.lasting_text", "--runs", "runs/one", *sizes, "--seed", 1, "--out", out)
    rows = result(out)["rows"]
    assert [(row["run"], row["conversations"]) for row in rows] == [
        ("one", number) for number in (-1, 0, 2)
    ]
    assert all(row["questions"] == 10 for row in rows)
    assert all(row["interval"][0] <= row["exact"] <= row["interval"][1] for row in rows)
    assert all(0 <= row["digits"] <= 6 for row in rows)
    stored = [row["kilobytes_per_person"] for row in rows]
    assert stored[0] < stored[1], "Telling writes rows that the fork then stores."
    assert "| conversations since | before | 0 | 2 |" in capsys.readouterr().out
