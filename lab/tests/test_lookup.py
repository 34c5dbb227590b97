"""The study of lookup in other words: its sentences, its rivals, how answers are counted."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.run import load_run
from lab.study.lookup import texts
from lab.study.lookup.evaluation import scores_of
from lab.study.lookup.neighbours import NearestNeighbours
from tests.benchmarks.programs import SMALL_RUN, result_lines, run, write_words

FWPKM_WAYS = ("written", "frozen", "gates open", "neighbours", "neighbours, gates open")
SENTENCE = "Room {key} has {value}."


def parts_of(sentences):
    split = [sentence.split("{key}") for sentence in sentences]
    return [{parts[place] for parts in split} for place in (0, 1)]


def test_sentences_of_training_are_nested_and_share_no_part_with_those_held_out():
    sentences = {number: texts.trained_sentences(number) for number in (1, 4, 16, 64, 102)}
    for fewer, more in itertools.pairwise(sentences.values()):
        assert more[: len(fewer)] == fewer
        assert len(set(more)) == len(more)
    assert len(texts.HELD_OUT) == 20
    for ours, held_out in zip(parts_of(sentences[102]), parts_of(texts.HELD_OUT), strict=True):
        assert not ours & held_out
    assert {texts.link_of(sentence) for sentence in sentences[4]} == {2, 4, 17, 21}
    with pytest.raises(ValueError, match="103 sentences: there are 1 to 102"):
        texts.trained_sentences(103)


def test_a_question_repeats_a_statement_of_the_same_row():
    books = [b"a word of a book " * 40, b"and another one of it " * 30]
    asked = texts.questions(books, SENTENCE, number=1, of=2, seed=3, length=400)
    for row, stated, answers in zip(*asked[:1], asked.stated, asked.answers, strict=True):
        text = "".join(map(chr, row))
        assert len(text) == 401
        said = [text[at - len("abcd has ") :][: len("abcd has 123456")] for at in stated]
        repeated = [text[at - len("abcd has ") :][: len("abcd has 123456")] for at in answers]
        assert sorted(said) == sorted(repeated)
        assert len(set(said)) == texts.NEEDLES
        assert max(stated) < min(answers)
    with pytest.raises(ValueError, match="Book 0 has 680 bytes; a row needs 801"):
        texts.questions(books, SENTENCE, number=0, of=2, seed=3, length=800)


def test_repeated_spans_stand_in_the_text_before_them(tmp_path):
    words = " ".join(f"w{number:05d}" for number in range(2000))
    found = texts.with_repeated_spans(words, np.random.default_rng(0))
    assert len(words) * 1.2 < len(found) < len(words) * 1.5
    # Each word of the text stands once; one that stands twice was said before, in order.
    seen, repeated = -1, 0
    for word in found.split():
        number = int(word[1:]) if len(word) == 6 and word[1:].isdigit() else None
        if number is not None and number <= seen:
            repeated += 1
            assert seen - number < (sum(texts.SPAN_DISTANCE) + texts.SPAN[1]) / len("w00000 ")
        elif number is not None:
            assert number == seen + 1 or word not in words.split()
            seen = number
    assert repeated > 200
    source, out = tmp_path / "a.jsonl", tmp_path / "new" / "b.jsonl"
    source.write_text(json.dumps({"id": "x", "text": words}) + "\n")
    texts.write_repeated(source, out, seed=0)
    one = json.loads(out.read_text())
    assert one["text"] == texts.with_repeated_spans(words, np.random.default_rng([0, 0]))


@pytest.mark.thorough
def test_neighbours_read_the_value_of_the_nearest_query_and_forget_the_oldest():
    rule = NearestNeighbours(key_dim=2, value_dim=1, lookahead=0, capacity=4)
    keys = jnp.asarray([[0.0, 1], [1, 0], [-1, 0], [0, -1], [3, 3]])[:, None]
    values = jnp.arange(1.0, 6)[:, None]
    weights = jnp.asarray([1.0, 1, 0, 0.5, 1])

    def chunk(at):
        ones = jnp.ones(at.stop - at.start)
        return rule.chunk(keys[at], values[at], (weights[at], ones, ones))

    memory = rule.init(jax.random.key(0))
    assert not rule.read(memory, keys)[0].any()
    memory = rule.step(memory, chunk(slice(0, 4))).memory
    near = keys + 0.1
    # The third token was not written: the nearest to it is the first or the fourth.
    np.testing.assert_array_equal(rule.read(memory, near)[0][:, 0], [1, 2, 1, 4, 1])
    memory = rule.step(memory, chunk(slice(4, 5))).memory
    assert rule.read(memory, near)[0][4] == 5
    memory = rule.step(memory, chunk(slice(4, 5))).memory  # Takes the place of the first one.
    assert rule.read(memory, near)[0][0] == 2
    # Of a longer chunk the last three stay, wherever they stand.
    small = dataclasses.replace(rule, capacity=3)
    memory = small.step(small.init(jax.random.key(0)), chunk(slice(0, 5))).memory
    np.testing.assert_array_equal(small.read(memory, keys)[0][:, 0], [2, 2, 4, 4, 5])


@pytest.mark.thorough
def test_neighbours_of_a_sequence_are_those_of_all_earlier_chunks():
    rule = NearestNeighbours(key_dim=3, value_dim=2, capacity=8)
    rng = np.random.default_rng(0)
    query, value = rng.normal(size=(1, 8, 1, 3)), rng.normal(size=(1, 8, 2))
    sequence = rule.sequence(jnp.asarray(query), jnp.asarray(value), chunk_size=4)
    found = rule.run(rule.init(jax.random.key(0)), sequence, chunk_size=4).output[0]
    # Of the first chunk three tokens have a target in it.
    distance = np.linalg.norm(query[0, 4:, None, 0] - query[0, None, :3, 0], axis=-1)
    np.testing.assert_array_equal(found[:4], 0)
    np.testing.assert_allclose(found[4:], value[0, 1 + distance.argmin(axis=1)], rtol=1e-6)


def test_answers_are_counted_by_first_digit_later_digits_and_all_bytes():
    answer = np.array([ord(x) for x in "123456"])
    tokens = np.concatenate([[65, 66], answer])[None]
    asked = texts.Questions(tokens, answers=np.array([[2]]), stated=np.array([[2]]))
    logits = np.zeros((1, 7, 257))
    logits[0, np.arange(1, 7), answer] = 10.0
    (score,) = scores_of(logits, asked)
    assert score[:3] == (1, 1, 1)
    assert score.nats == pytest.approx(6 * np.log1p(256 * np.exp(-10)), abs=1e-4)
    logits[0, 1, 70] = 20.0  # A letter instead of the first digit, which stays the best of ten.
    (score,) = scores_of(logits, asked)
    assert score[:3] == (1, 1, 0)
    logits[0, 2, ord("9")] = 20.0
    (score,) = scores_of(logits, asked)
    assert score[:3] == (1, 0.8, 0)


@pytest.mark.slow
def test_runs_of_each_kind_are_trained_asked_and_passed_over(tmp_path):
    write_words(tmp_path)
    text = "".join(f"word{number} " for number in range(400))
    (tmp_path / "valid.jsonl").write_text(2 * (json.dumps({"id": "v", "text": text}) + "\n"))
    out = tmp_path / "lines.jsonl"
    small = [x for x in SMALL_RUN if "length" not in x]
    options = (
        *("--steps", 1, "--sentences", 2, "--extra", *small),
        *("--data", tmp_path, "--runs-dir", tmp_path / "runs", "--out", out),
    )
    runs = ("fwpkm:4:0", "attention:spans:1", "matrix:1:0", "ungated:1:0", "pkm_above:1:0")
    assert run("lab.study.lookup.__main__", "--runs", *runs, *options) == 0
    lines = result_lines(out)
    ways = [(line["kind"], line["words"], line["way"]) for line in lines]
    assert ways == [
        *(("fwpkm", "held out", way) for way in FWPKM_WAYS),
        ("fwpkm", "trained", "written"),
        ("attention", "held out", "read"),
        *(("matrix", words, "read") for words in ("held out", "trained")),
        *(("ungated", "held out", way) for way in FWPKM_WAYS if not way.endswith("gates open")),
        ("ungated", "trained", "written"),
        *(("pkm_above", "held out", way) for way in FWPKM_WAYS),
        ("pkm_above", "trained", "written"),
    ]
    config = load_run(tmp_path / "runs" / "pkm_above_1_1_seed0").model.config
    assert (config.memory_layers, config.pkm_layers) == ((2,), (2,))
    rule = config.fast_weight.rule
    assert (config.pkm.num_subkeys, config.pkm.value_dim) == (rule.num_subkeys, rule.value_dim)
    for line in lines:
        assert np.shape(line["by_book"]) == (2, 4)
        assert np.shape(line["by_sentence"]) == (2, 4)
        assert (line["gates"] is None) == (line["kind"] in ("attention", "matrix"))
        opened = line["way"].endswith("gates open") or line["kind"] == "ungated"
        assert not opened or line["gates"] == [1, 1, 1]
    assert run("lab.study.lookup.__main__", "--runs", *runs, *options) == 0
    assert len(result_lines(out)) == len(lines)
    elsewhere = f"1={tmp_path / 'runs' / 'fwpkm_4_1_seed0'}"
    assert run("lab.study.lookup.__main__", "--runs", "--given", elsewhere, *options) == 0
    assert [line["given"] for line in result_lines(out)[len(lines) :]] == 6 * ["fwpkm_4_1_seed0"]
    with pytest.raises(SystemExit, match="'runs/a' is no NUMBER=FOLDER"):
        run("lab.study.lookup.__main__", "--runs", "--given", "runs/a", *options)
    with pytest.raises(SystemExit, match="'fwpkm:many:0' is no KIND:RECIPE:SEED"):
        run("lab.study.lookup.__main__", "--runs", "fwpkm:many:0", *options)
