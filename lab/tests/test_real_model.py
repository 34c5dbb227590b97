"""Sessions of facts: forms and words of training and test are apart, and a run is asked rightly."""

import json
import random

import numpy as np
import pytest

from fwpkm_jax.data.sessions import Answer, SessionRow
from lab.real_model import evaluate, grammar


@pytest.fixture
def tokenizer_json(tmp_path):
    letters = "abcdefghijklmnop"
    words = [f"{a}{b}ro{c}" for a in letters for b in "aeiou" for c in letters]
    vocabulary = {f"\u0120{word}": number for number, word in enumerate(words)}
    vocabulary |= {f"\u0120{word.capitalize()}": -1 for word in words}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return path


def make(path, **new):
    return grammar.Grammar(path, ["A book."], **new)


def test_a_session_states_what_it_asks_and_none_comes_twice(tokenizer_json):
    made = make(tokenizer_json, new_forms=False, new_words=False)
    seen = set()
    for number in range(20):
        session = made.session(random.Random(number), facts=8, asked=8, chat=0.5)
        told = [one for one in session.told if isinstance(one, grammar.Fact)]
        assert len(told) >= 8
        assert len(session.asked) == 8
        for question in session.asked:
            fact = session.told[question.fact]
            assert fact.value == question.answer
            assert not {"N", "R", "V", "P"} & set(fact.before.split())
        text = json.dumps(grammar.record(session, random.Random(0)))
        assert text not in seen
        seen.add(text)


def test_words_and_forms_of_the_test_are_not_those_of_training(tokenizer_json):
    train = make(tokenizer_json, new_forms=False, new_words=False)
    test = make(tokenizer_json, new_forms=True, new_words=True)
    assert not set(train._low) & set(test._low)
    assert not set(train._high) & set(test._high)
    for name in ("own statement", "own question", "my statement", "opening", "tail"):
        assert not set(train._parts[name]) & set(test._parts[name])


class Parrot:
    """Says what was read first, token by token."""

    def start(self, sessions):
        return [np.zeros(0, int)] * sessions

    def read(self, memory, rows):
        return [np.concatenate([one, row]) for one, row in zip(memory, rows, strict=True)]

    def right(self, memory, rows):
        return [
            [np.array_equal(one[: len(x.tokens)], x.tokens) for x in row.answers]
            for one, row in zip(memory, rows, strict=True)
        ]


def test_what_is_told_is_asked_by_condition():
    def session(value, answer):
        ask = Answer(1, np.array([answer]), "", None)
        return [SessionRow(np.array([value, 0]), []), SessionRow(np.array([9, answer]), [ask])]

    sessions = [session(number, number + number // 4) for number in range(6)]
    found = evaluate.ask(Parrot(), sessions)
    assert found["exact"] == pytest.approx(4 / 6, abs=1e-4)
    assert (found["answers"], found["sessions"]) == (6, 6)
    assert found["interval"] > 0
    assert evaluate.ask(Parrot(), sessions, write=False)["exact"] == 0
    ((joined,), *_) = evaluate.in_context(sessions)
    assert joined.tokens.tolist() == [0, 0, 9, 0]
    assert joined.answers[0].start == 3
