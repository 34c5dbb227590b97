"""Where answers come from: questions, conditions, tests and intervals, and their planted faults."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from fwpkm_jax.audit import Answer, answers_freely, covers, first_write, headline, origin_lines
from fwpkm_jax.audit.asking import (
    _forced_logits,
    _last_logits,
    _read,
    answers_of,
    generates_freely,
    other_paths,
)
from fwpkm_jax.audit.bundle import recomputed, write_bundle
from fwpkm_jax.audit.origin import mcnemar
from fwpkm_jax.audit.questions import Question, Questions, questions_of
from fwpkm_jax.audit.trace import traced
from fwpkm_jax.data import NeedleMix, RecallData, TextData
from fwpkm_jax.evaluation.intervals import bootstrap
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.io.untrusted import OutsideFileError
from tests.audit.conftest import make_subject

DATA = RecallData(
    length=32, num_facts=4, num_keys=8, num_values=8, num_filler=8, min_distance=12, num_valid=4
)


@pytest.fixture(scope="module")
def facts(subject):
    return replace(subject, data=DATA)


@pytest.fixture(scope="module")
def questions(facts) -> Questions:
    return questions_of(facts, texts=3, length=None)


def test_facts_stand_at_every_depth_and_their_values_once(questions):
    depths = [[one.stated / 32 for one in asked] for asked in questions.questions]
    assert all(
        [int(4 * depth) for depth in row] == [0, 1, 2, 3] for row in np.array(depths).tolist()
    ), depths
    for text, other, asked in zip(
        questions.texts, questions.others, questions.questions, strict=True
    ):
        places = [one.stated for one in asked]
        assert sorted(np.flatnonzero(text >= DATA.first_value)) == places
        assert sorted(np.flatnonzero(text != other)) == places
        for one in asked:
            assert text[one.stated - 1] == one.tokens[0]
            assert text[one.stated] == one.answer[0]


def test_needles_in_text_are_trainings_own_sentence(subject, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"word{number}" for number in range(400)))
    mix = NeedleMix(sentence="Call {key} at {value}.", keys="names", value_digits=3)
    data = TextData(train_paths=(str(path),), valid_paths=(str(path),), length=256, needles=mix)
    found = questions_of(replace(subject, data=data), texts=4, length=400)
    text = bytes(found.texts[0].astype(np.uint8)).decode()
    told = re.findall(r"Call (\w+) at (\d{3})\.", text)
    assert len(told) == mix.num_needles
    for one, (key, value) in zip(found.questions[0], told, strict=True):
        assert bytes(one.tokens.astype(np.uint8)).decode() == f" Call {key} at "
        assert bytes(one.answer.astype(np.uint8)).decode() == value
        assert text[one.stated : one.stated + 3] == value
    assert found.chance == pytest.approx(1e-3)
    other = bytes(found.others[0].astype(np.uint8)).decode()
    assert not set(re.findall(r"\d{3}", other)) & {value for _, value in told}


def test_data_that_state_nothing_are_refused(subject):
    with pytest.raises(ValueError, match="NoneType states no facts that can be asked for"):
        questions_of(subject, texts=2, length=None)


def answer(document, question, condition="written", *, exact, run="a", **changes):
    values = {
        "depth": question / 4,
        "distance": 100 - question,
        "reach": 6,
        "written": True,
        "expected": "12",
        "answer": "12" if exact else "13",
        "forced": 1.0 if exact else 0.5,
        "first": exact,
        "nats": 0.1 if exact else 4.0,
        "chance": 0.01,
        "first_chance": 0.1,
    }
    return Answer(
        run=run, document=document, question=question, condition=condition, exact=exact,
        **(values | changes),
    )  # fmt: skip


def answers(condition, right, runs=("a",)):
    """Of 6 texts with 4 questions each, those numbers below `right` are answered."""
    return [
        answer(document, question, condition, exact=4 * document + question < right, run=run)
        for run in runs
        for document, question in itertools.product(range(6), range(4))
    ]


def line_of(found, name):
    return {line.name: line for line in origin_lines(found)}[name]


def test_answers_of_a_memory_pass_and_of_another_path_fail():
    sound = answers("written", 20) + answers("frozen", 0)
    assert line_of(sound, "recall, frozen").verdict == "pass"
    leaking = answers("written", 20) + answers("frozen", 12)
    line = line_of(leaking, "recall, frozen")
    assert line.verdict == "fail"
    assert "the answers come from somewhere else than what this memory was told" in line.text


def test_an_answer_that_needs_no_statement_is_a_leak():
    line = line_of(answers("written", 20) + answers("not stated", 9), "recall, not stated")
    assert line.verdict == "fail"


def test_pairs_are_tested_by_mcnemar():
    line = line_of(answers("written", 20) + answers("reset", 12), "written against reset")
    assert line.numbers["difference"] == pytest.approx(8 / 24)
    assert line.numbers["mcnemar_p"] == pytest.approx(2 / 2**8)


def test_mcnemars_exact_test_counts_the_pairs_that_differ():
    first = np.array([1] * 8 + [0] + [1] * 5 + [0] * 5, bool)
    second = np.array([0] * 8 + [1] + [1] * 5 + [0] * 5, bool)
    assert mcnemar(first, second) == pytest.approx(2 * (1 + 9) / 2**9)
    assert mcnemar(first, first) == 1


def test_the_interval_is_over_the_units_that_were_drawn():
    """100 questions of each of four texts that agree with each other are four numbers."""
    sums, sizes = np.array([100, 0, 100, 0]), np.full(4, 100)
    wide = bootstrap(sums, sizes, np.zeros(4, int))
    assert wide == (0, 1)
    # Two trainings, one of which knows all: the interval spans both.
    seeds = bootstrap(np.array([9.0] * 20 + [0.0] * 20), np.full(40, 9), np.repeat([0, 1], 20))
    assert seeds == (0, 1)
    assert bootstrap(np.array([1.0]), np.array([2]), np.array([0])) is None


def test_the_headline_counts_written_values_only_and_names_the_unit():
    found = answers("written", 12) + answers("frozen", 0)
    waiting = [one._replace(written=False) for one in found if one.question == 3]
    told = headline([one for one in found if one.question != 3] + waiting)
    assert told.startswith("Of 18 stated values 0.500 [")
    assert "0.000 with the memory frozen; guessing gives 0.01. One trained model" in told
    assert "2 trainings; the interval is over" in headline(answers("written", 12, ("a", "b")))


def test_the_share_that_a_window_covers_is_told():
    found = [
        one._replace(distance=5) if one.question == 3 else one for one in answers("written", 9)
    ]
    line = line_of(found, "what windows cover")
    assert line.text.startswith("Mixers look 6 tokens back: 6 of 24 values lie within.")


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "verdict"), [(4, "pass"), (40, "fail")])
def test_a_window_that_covers_the_needle_is_named(window, verdict):
    """The last value stands less than 16 tokens before the question, and more than 3."""
    subject = replace(make_subject(window=window), data=DATA)
    questions = questions_of(subject, texts=2, length=None)
    texts = [np.concatenate([x, np.zeros_like(x[:, :8])], axis=1)
             for x in (questions.texts, questions.others)]  # fmt: skip
    logits = [_last_logits(subject, questions, one, write=False, keep_caches=True) for one in texts]
    line = covers("needles", *logits)
    assert line.verdict == verdict
    if verdict == "fail":
        assert "move 2 of 2 questions" in line.text
        assert "a window, a convolution or a cache covers the needle" in line.text
        assert other_paths(subject, questions).verdict == "pass"  # Once its caches are empty.


@pytest.mark.thorough
def test_an_accuracy_on_forced_digits_is_named(facts, questions):
    longer = questions._replace(
        questions=[
            [Question(one.tokens, np.array([one.answer[0], 3, 5]), one.stated) for one in asked]
            for asked in questions.questions
        ]
    )
    model = facts.model
    state = _read(facts, longer.texts, write=True)

    def forced(texts, asked, expected):
        """Each token behind the right ones before it, as many accuracies are computed."""
        given = longer._replace(
            questions=[
                [Question(tokens, value, 0)] for tokens, value in zip(asked, expected, strict=True)
            ]
        )
        return np.argmax(_forced_logits(model, state.stream, given, 0), axis=-1)

    tokens = [asked[0].tokens for asked in longer.questions]
    values = np.stack([asked[0].answer for asked in longer.questions])
    line = answers_freely("forced", forced, longer.texts, tokens, values, (values + 7) % 24)
    assert line.verdict == "fail"
    assert line.text.endswith("an accuracy on forced digits, which is no recall.")
    assert generates_freely(facts, longer).verdict == "pass"


@pytest.mark.thorough
def test_every_condition_asks_every_question(facts, questions):
    found = answers_of(facts, questions, run="tiny")
    conditions = {one.condition for one in found}
    assert conditions == {
        *("written", "frozen", "reset", "without reads", "other memory", "not stated"),
        *("written, caches kept", "frozen, caches kept"),
    }
    assert len(found) == len(conditions) * 3 * 4
    by = {(one.condition, one.document, one.question): one for one in found}
    for key in itertools.product(range(3), range(4)):
        # With empty caches, a memory that was put back is one that was never written.
        assert by["reset", *key].nats == by["frozen", *key].nats
        assert by["written", *key].nats != by["frozen", *key].nats
        assert by["without reads", *key].nats != by["frozen", *key].nats
    # 32 tokens in chunks of 8 with a lookahead of 1: three writes.
    assert {one.written for one in found if one.distance < 8} == {False}
    assert {one.written for one in found if one.distance > 9} == {True}


@pytest.mark.thorough
def test_storage_addressing_and_readout_are_told_apart(facts, questions):
    numbers = traced(facts, questions).numbers
    assert numbers["tokens"] == 3 * 4
    assert 0 < numbers["stored"] < 1  # Later tokens overwrite the 16 slots; the last wait.
    assert 0 <= numbers["addressed"] <= numbers["stored"]


def test_a_first_write_that_destroys_is_named():
    sound = first_write(np.full(8, 1.9), np.full(8, 1.86))
    assert (sound.verdict, round(sound.numbers["written"], 2)) == ("pass", 1.9)
    line = first_write(np.full(8, 10.81), np.full(8, 1.86))
    assert line.verdict == "fail"
    assert line.text.endswith("writing destroys what the model knows.")
    assert first_write(np.array([np.nan]), np.zeros(1)).verdict == "fail"


def test_the_headline_is_computed_again_from_the_bundle(tmp_path):
    found = answers("written", 12) + answers("frozen", 0)
    write_bundle(tmp_path, origin_lines(found), found, title="Audit", provenance={})
    told, lines = recomputed(tmp_path)
    assert told == headline(found)
    assert lines == origin_lines(found)
    # Answers that say something else, under a manifest that was made to fit.
    rows = (tmp_path / "answers.jsonl").read_text().replace('"exact": false', '"exact": true')
    (tmp_path / "answers.jsonl").write_text(rows)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"]["answers.jsonl"] = sha256(tmp_path / "answers.jsonl")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OutsideFileError, match=r"and its answers give 'Of 24 stated values 1.000"):
        recomputed(tmp_path)
