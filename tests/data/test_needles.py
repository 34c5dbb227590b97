import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from fwpkm_jax.data import NeedleMix, TextData, load_tokenizer, make_dataset

NEEDLES = NeedleMix(
    num_needles=2, key_characters=2, value_digits=3, min_distance=64, answer_weight=5.0
)
SENTENCE = re.compile(r"The secret number for ID-([0-9a-f]{2}) is ([0-9]{3})\.")
BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Rows of one book of numbered words."""
    path = tmp_path_factory.mktemp("text") / "book.jsonl"
    words = " ".join(f"word{number}" for number in range(4000))
    path.write_text(json.dumps({"id": "b", "text": words}))
    return TextData(train_paths=(str(path),), length=256, needles=NEEDLES)


def rows_of(config, number, *, seed=0, batch_size=1):
    batches = itertools.islice(
        make_dataset(config, split="train", batch_size=batch_size, seed=seed), number
    )
    return [(batch["tokens"][0], batch["loss_weight"][0]) for batch in batches]


def test_each_needle_is_stated_in_the_first_part_and_again_far_behind(config):
    for tokens, _ in rows_of(config, 20):
        text = BYTES.decode(tokens)
        found = list(SENTENCE.finditer(text))
        stated, asked = found[:2], found[2:]
        assert len(found) == 4
        assert {m.groups() for m in stated} == {m.groups() for m in asked}
        assert len({m[1] for m in stated}) == 2
        where = {m[1]: m.start() for m in stated}
        assert min(m.start() - where[m[1]] for m in asked) >= NEEDLES.min_distance


def test_answers_alone_have_the_answer_weight(config):
    for tokens, weight in rows_of(config, 20):
        answers = [m[2] for m in SENTENCE.finditer(BYTES.decode(tokens))][2:]
        assert BYTES.decode(tokens[1:][weight == 5.0]) == "".join(answers)
        assert set(weight.tolist()) == {1.0, 5.0}


def test_the_sentences_other_bytes_have_a_weight_of_their_own(config):
    silent = replace(config, needles=replace(NEEDLES, sentence_weight=0.0))
    for (tokens, weight), (same, loud) in zip(
        rows_of(silent, 20), rows_of(config, 20), strict=True
    ):
        np.testing.assert_array_equal(tokens, same)
        text = BYTES.decode(tokens)
        inside = np.zeros(len(tokens), bool)
        for found in SENTENCE.finditer(text):
            inside[found.start() : found.end() + 1] = True  # And the space after it.
        np.testing.assert_array_equal(weight, np.where(inside[1:] & (loud == 1), 0, loud))


def test_without_its_needles_a_row_is_the_text_it_was_made_of(config):
    plain = rows_of(replace(config, needles=None), 20)
    for (tokens, _), (text, _) in zip(rows_of(config, 20), plain, strict=True):
        left = SENTENCE.sub("", BYTES.decode(tokens)).replace(" ", "")
        assert BYTES.decode(text).replace(" ", "").startswith(left)
        assert len(tokens) == len(text)


def test_needles_stand_before_words(config):
    for tokens, _ in rows_of(config, 20):
        # The start of a part may cut a word: at most the first sentence of each part.
        text = BYTES.decode(tokens)
        cut = [m for m in SENTENCE.finditer(text) if m.start() and text[m.start() - 1] != " "]
        assert len(cut) <= 2


def test_needles_follow_the_seed_and_change_from_row_to_row(config):
    def keys(**arguments):
        return [SENTENCE.findall(BYTES.decode(t)) for t, _ in rows_of(config, 40, **arguments)]

    assert keys() == keys()
    assert keys() != keys(seed=1)
    # The book has 118 rows, so a row of the second epoch has the text of one before.
    first = keys()
    assert len({tuple(row) for row in first}) == len(first)


def test_a_share_of_the_rows_stays_plain_text(config):
    mixed = replace(config, needles=replace(NEEDLES, share=0.5))
    plain = rows_of(replace(config, needles=None), 60)
    same = [
        bool(np.array_equal(tokens, text))
        for (tokens, _), (text, _) in zip(rows_of(mixed, 60), plain, strict=True)
    ]
    assert 15 < sum(same) < 45


def test_a_stopped_iterator_continues_with_the_same_needles(config):
    dataset = make_dataset(config, split="train", batch_size=2, seed=0)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    expected = next(iterator)["tokens"]
    resumed = iter(dataset)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["tokens"], expected)


def test_validation_text_has_no_needles(config):
    config = replace(config, valid_paths=config.train_paths)
    for batch in make_dataset(config, split="valid", batch_size=1, seed=0):
        assert not SENTENCE.search(BYTES.decode(batch["tokens"][0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": NEEDLES.least_length - 1}, f"raise length to {NEEDLES.least_length}"),
        ({"tokenizer": "mistral-v1"}, "hidden in bytes"),
    ],
)
def test_text_that_cannot_hold_needles_is_refused(config, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(config, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": 0.0}, "share=0.0"),
        ({"num_needles": 0}, "num_needles=0"),
        ({"answer_weight": 0.0}, "answer_weight=0.0"),
        ({"sentence_weight": -1.0}, "sentence_weight=-1.0"),
        ({"num_needles": 17, "key_characters": 1}, "gives 16 keys"),
        ({"keys": "names", "key_characters": 2}, "key_characters=2 gives no names; use 3"),
        ({"sentence": "Call {key}."}, "must hold {key} and behind it {value}"),
        ({"other_sentences": ("{key} {value}", "No key.")}, "sentence='No key.' must hold"),
        ({"sentence": "{value} is {key}."}, "must hold {key} and behind it {value}"),
        ({"sentence": "Call {key!r} at {value:9}."}, "must hold {key} and behind it {value}"),
        ({"sentence": "Call {key at {value}."}, "must hold {key} and behind it {value}"),
    ],
)
def test_a_mix_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        NeedleMix(**fields)


def test_a_sentence_of_ones_own_with_names_of_several_lengths(config):
    mix = replace(
        NEEDLES, sentence="Call {key} at {value}.", keys="names", key_characters=5, num_needles=3
    )
    lengths = set()
    for tokens, weight in rows_of(replace(config, needles=mix), 20):
        text = BYTES.decode(tokens)
        found = re.findall(r"Call ([A-Z][a-z]{2,4}) at ([0-9]{3})\. ", text)
        assert len(tokens) == config.length + 1
        assert len(found) == 6
        assert set(found[:3]) == set(found[3:])
        assert BYTES.decode(tokens[1:][weight == 5.0]) == "".join(number for _, number in found[3:])
        lengths |= {len(name) for name, _ in found}
    assert lengths == {3, 4, 5}


def test_each_row_has_one_of_several_sentences_for_all_of_its_needles(config):
    sentences = (
        "Call {key} at {value}.",
        "{key}: {value}.",
        "Ask {key}, who has always had {value}.",
    )
    mix = replace(NEEDLES, sentence=sentences[0], other_sentences=sentences[1:])
    patterns = ("Call ([0-9a-f]{2}) at ([0-9]{3})", " ([0-9a-f]{2}): ([0-9]{3})")
    patterns = (*patterns, "Ask ([0-9a-f]{2}), who has always had ([0-9]{3})")
    counts = [0, 0, 0]
    for tokens, weight in rows_of(replace(config, needles=mix), 60):
        text = " " + BYTES.decode(tokens)
        (found,) = (
            (number, list(re.finditer(pattern, text)))
            for number, pattern in enumerate(patterns)
            if re.search(pattern, text)
        )
        number, said = found
        counts[number] += 1
        assert {m.groups() for m in said[:2]} == {m.groups() for m in said[2:]}
        assert len(said) == 4
        digits = {m[1]: m.start(2) for m in said[:2]}
        assert min(m.start(2) - digits[m[1]] for m in said[2:]) >= NEEDLES.min_distance
        assert BYTES.decode(tokens[1:][weight == 5.0]) == "".join(m[2] for m in said[2:])
    assert min(counts) >= 10
    # Room for the longest of them.
    assert mix.least_length == replace(mix, sentence=sentences[2], other_sentences=()).least_length


def test_the_least_length_holds_the_needles(config):
    ((tokens, _),) = rows_of(replace(config, length=NEEDLES.least_length), 1)
    assert len(SENTENCE.findall(BYTES.decode(tokens))) == 4


def test_drawn_sentences_differ_by_row_and_answers_say_where_their_digits_were_told(tmp_path):
    path = tmp_path / "book.jsonl"
    text = "It was a long, quiet 1899 morning; and nobody saw the grey cat leave. " * 600
    path.write_text(json.dumps({"id": "b", "text": text}))
    needles = replace(NEEDLES, drawn_share=1.0)
    config = TextData(train_paths=(str(path),), length=300, needles=needles)
    batches = itertools.islice(make_dataset(config, split="train", batch_size=4, seed=0), 20)
    sentence = re.compile(r"([A-Z][a-z ,]*) ([0-9a-f]{2}) ([a-z ,]+) ([0-9]{3})\. ")
    wordings, asked = set(), 0
    for batch in batches:
        labels, distance = batch["tokens"][:, 1:], batch["answer_distance"]
        rows, places = np.nonzero(distance)
        back = labels[rows, places - distance[rows, places]]
        np.testing.assert_array_equal(labels[rows, places], back)
        assert (batch["loss_weight"][rows, places] == 5.0).all()
        asked += len(rows)
        for row in batch["tokens"]:
            found = sentence.findall(BYTES.decode(row))
            wordings |= {(opening, link) for opening, _, link, _ in found}
    assert asked == 80 * 2 * 3
    assert len(wordings) > 20


@pytest.mark.parametrize(("share", "length"), [(0.0, 171), (0.5, 213)])
def test_the_least_length_counts_drawn_sentences(share, length):
    assert replace(NEEDLES, drawn_share=share).least_length == length


def test_rows_without_needles_ask_nothing(config):
    rare = replace(config, needles=replace(NEEDLES, share=0.3))
    batches = [*itertools.islice(make_dataset(rare, split="train", batch_size=40, seed=0), 1)]
    asking = (batches[0]["answer_distance"] > 0).any(axis=1)
    assert 2 < asking.sum() < 25
    np.testing.assert_array_equal(asking, (batches[0]["loss_weight"] == 5.0).any(axis=1))
