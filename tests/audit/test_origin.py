"""Where answers come from: questions, conditions, tests and intervals, and their planted faults."""

import contextlib
import itertools
import json
import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fwpkm_jax.audit import Answer, covers, first_write, headline, origin_lines
from fwpkm_jax.audit.asking import answers_of, ask, last_logits, other_paths, read_texts
from fwpkm_jax.audit.bundle import recomputed, write_bundle
from fwpkm_jax.audit.origin import figures, mcnemar
from fwpkm_jax.audit.paths import ModelProgram
from fwpkm_jax.audit.questions import Question, Questions, questions_of
from fwpkm_jax.data import NeedleMix, RecallData, TextData
from fwpkm_jax.evaluation.intervals import bootstrap
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.generation import generate, init_generation
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
    return questions_of(facts.data, texts=3, length=None, seed=0)


@pytest.mark.thorough
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
    found = questions_of(data, texts=4, length=400, seed=0)
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
    with pytest.raises(ValueError, match="no data are known that say what the model can be asked"):
        questions_of(subject.data, texts=2, length=None, seed=subject.seed)


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
    line = line_of(answers("written", 20) + answers("reset", 12), "recall, reset")
    found = line.numbers["written against it"]
    assert found["exact"] == pytest.approx(8 / 24)
    assert found["mcnemar_p"] == pytest.approx(2 / 2**8)
    assert "Written: +0.333 [" in line.text


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
    told = figures(found)
    assert told["what windows cover"].startswith(
        "Mixers look 6 tokens back: 6 of 24 values lie within."
    )
    assert told["recall, written"].startswith("Exact 0.375 [")


@pytest.mark.thorough("4-pass")
@pytest.mark.parametrize(("window", "verdict"), [(4, "pass"), (40, "fail")])
def test_a_window_that_covers_the_needle_is_named(window, verdict):
    """The last value stands less than 16 tokens before the question, and more than 3."""
    subject = replace(make_subject(window=window), data=DATA)
    questions = questions_of(subject.data, texts=2, length=None, seed=subject.seed)
    texts = [np.concatenate([x, np.zeros_like(x[:, :8])], axis=1)
             for x in (questions.texts, questions.others)]  # fmt: skip
    program = ModelProgram(subject.model, subject.memory)
    options = {"write": False, "keep_caches": True}
    logits = [last_logits(program, questions, one, **options) for one in texts]
    line = covers("needles", *logits)
    assert line.verdict == verdict
    if verdict == "fail":
        assert "move 2 of 2 questions" in line.text
        assert "a window, a convolution or a cache covers the needle" in line.text
        assert other_paths(subject, questions).verdict == "pass"  # Once its caches are empty.


@pytest.mark.slow
def test_answers_are_those_of_generate_and_beside_them_what_right_tokens_make_likely(
    facts, questions
):
    """Values of three tokens, questions of several lengths, and `generate` as the reference."""
    rng = np.random.default_rng(2)
    row = [Question(rng.integers(24, size=n), rng.integers(24, size=3), 0) for n in (1, 3, 2)]
    longer = questions._replace(questions=[[one] for one in row])
    program = ModelProgram(facts.model, facts.memory)
    spoken, given = ask(program, read_texts(program, longer.texts, write=True), row, longer)
    for text, one, tokens, logits in zip(longer.texts, row, spoken, given, strict=True):
        state = init_generation(facts.model, facts.memory, batch=1, max_length=64)
        state = generate(facts.model, [text], state, max_new_tokens=0).state
        options: dict[str, Any] = {"write": False, "keep_state": True}
        out = generate(facts.model, [one.tokens], state, max_new_tokens=3, **options)
        np.testing.assert_array_equal(out.tokens[0], tokens)
        for number in range(3):
            forced = np.concatenate([one.tokens, one.answer[:number]])
            out = generate(facts.model, [forced], state, max_new_tokens=0, **options)
            np.testing.assert_allclose(out.state.logits[0], logits[number], atol=1e-4)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_memory_whose_reads_ignore_it_fails_and_one_that_adds_zero_is_skipped(facts, questions):
    memory_layer = facts.model.blocks[0].memory
    assert other_paths(facts, questions).verdict == "pass"
    kept = memory_layer.out_proj.kernel[...]
    try:
        memory_layer.out_proj.kernel[...] = 0 * kept
        with pytest.raises(ValueError, match="the memory adds zero to the logits"):
            other_paths(facts, questions)
    finally:
        memory_layer.out_proj.kernel[...] = kept
    ignored = questions._replace(others=questions.texts)
    line = other_paths(facts, ignored)
    assert line.verdict == "fail"
    assert line.text.endswith("it cannot fail.")


def test_a_first_write_that_destroys_is_named():
    sound = first_write(np.full(8, 1.9), np.full(8, 1.86))
    assert (sound.verdict, round(sound.numbers["written"], 2)) == ("pass", 1.9)
    line = first_write(np.full(8, 10.81), np.full(8, 1.86))
    assert line.verdict == "fail"
    assert line.text.endswith("writing destroys what the model knows.")
    assert first_write(np.array([np.nan]), np.zeros(1)).verdict == "fail"


@pytest.mark.slow
def test_the_headline_is_computed_again_from_the_bundle(tmp_path):
    found = answers("written", 12) + answers("frozen", 0)
    write_bundle(tmp_path, origin_lines(found), found, title="Audit", provenance={})
    again = recomputed(tmp_path)
    assert again == (headline(found), figures(found), origin_lines(found))
    # Answers that say something else, under a manifest that was made to fit.
    rows = (tmp_path / "answers.jsonl").read_text().replace('"exact": false', '"exact": true')
    (tmp_path / "answers.jsonl").write_text(rows)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"]["answers.jsonl"] = sha256(tmp_path / "answers.jsonl")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OutsideFileError, match=r"and its answers give 'Of 24 stated values 1.000"):
        recomputed(tmp_path)


ODD = ["x", None, [1], {"a": 1}, 5, -1, 1e308, float("inf"), float("nan"), 10**400, True]


def change(folder, rows):
    """Other answers, under a manifest that was made to fit."""
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["answers.jsonl"] = sha256(folder / "answers.jsonl")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_bundle_with_values_of_any_kind_is_refused_in_one_line(tmp_path):
    found = answers("written", 12) + answers("frozen", 0)
    write_bundle(tmp_path, origin_lines(found), found, title="Audit", provenance={})
    rows = [one._asdict() for one in found]
    for name, value in itertools.product(rows[0], ODD):
        change(tmp_path, [{**row, name: value} if n < 3 else row for n, row in enumerate(rows)])
        with contextlib.suppress(OutsideFileError):  # No other error; a value may also fit.
            recomputed(tmp_path)
    for some in ([], rows[-24:], [{**row, "document": n} for n, row in enumerate(rows)]):
        change(tmp_path, some)
        with pytest.raises(OutsideFileError, match="and its answers give"):
            recomputed(tmp_path)
    for name, value in {
        "run": None,
        "exact": 1,
        "distance": -1,
        "chance": 2.0,
        "nats": 1e308,
    }.items():
        change(tmp_path, [{**rows[0], name: value}])
        with pytest.raises(OutsideFileError, match=f"line 1 is no answer \\({name} is "):
            recomputed(tmp_path)


def test_a_bundle_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    write_bundle(tmp_path, [], [], title="Audit", provenance={})
    with (tmp_path / "answers.jsonl").open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(OutsideFileError, match="has more than 67,108,864 bytes"):
        recomputed(tmp_path)
    (tmp_path / "answers.jsonl").unlink()
    os.mkfifo(tmp_path / "answers.jsonl")
    with pytest.raises(OutsideFileError, match="is no file of bytes on a disk"):
        recomputed(tmp_path)
