import itertools
import re

import pytest

from fwpkm_jax.evaluation.needle.config import SampleSettings
from fwpkm_jax.evaluation.needle.samples import build_samples
from fwpkm_jax.evaluation.needle.scores import depth_bin

WORDS = [f"w{i}" for i in range(1000)]


def samples(num_words: int = 250, *, words: int = 100, seed: int = 0, **options):
    text = "\n  ".join(WORDS[:num_words])
    return list(build_samples([("book", text)], SampleSettings(**options), words=words, seed=seed))


def test_every_depth_has_one_of_ten_bins():
    assert [depth_bin(depth) for depth in (0.0, 9.9, 10.0, 99.9, 100.0)] == [0, 0, 1, 9, 9]


def test_needles_and_question_read_exactly_as_the_protocol_says():
    sample = samples()[0]
    sentences = re.findall(r"The secret number for ID-[0-9a-f]{4} is \d{6}\.", sample.haystack)
    assert sorted(sentences) == sorted(needle.sentence for needle in sample.needles)
    asked = sample.needles[sample.target]
    assert sample.question == f" The secret number for ID-{asked.key} is "
    assert sample.answer == asked.value
    assert sample.depth == asked.depth


def test_keys_are_unique_over_all_samples():
    found = samples(1000, words=20)
    keys = [needle.key for sample in found for needle in sample.needles]
    assert len(found) == 50
    assert len(set(keys)) == len(keys) == 250


def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    assert samples(seed=3) == samples(seed=3)
    assert {s.answer for s in samples(seed=3)}.isdisjoint(s.answer for s in samples(seed=4))


def test_haystacks_are_consecutive_cuts_and_short_ones_are_skipped():
    # 250 words in cuts of 100: the last has just the half that is needed; of 249 it has not.
    assert [s.words for s in samples(250)] == [100, 100, 50]
    assert [s.words for s in samples(249)] == [100, 100]
    texts = []
    for sample in samples(250):
        text = sample.haystack
        for needle in sample.needles:
            text = text.replace(needle.sentence + " ", "").replace(" " + needle.sentence, "")
        texts.append(text)
    assert " ".join(texts) == " ".join(WORDS[:250])


def test_every_needle_stands_before_the_word_of_its_depth():
    for sample in samples(1000):
        for needle in sample.needles:
            assert needle.word_index == int(needle.depth / 100 * sample.words)
            before = sample.haystack[: sample.haystack.index(needle.sentence)].split()
            assert sum(word.startswith("w") for word in before) == needle.word_index


def test_targets_take_turns_at_the_depths_asked_for():
    found = samples(1000, depths=(0, 50, 100))
    for sample, depth in zip(found, itertools.cycle((0, 50, 100)), strict=False):
        assert sample.depth == pytest.approx(depth)
    assert found[0].haystack.startswith(f"The secret number for ID-{found[0].question[26:30]}")
    assert found[2].haystack.endswith(found[2].needles[found[2].target].sentence)


def test_lengths_of_keys_and_values_are_options():
    sample = samples(num_needles=3, key_characters=2, value_digits=4)[0]
    assert {(len(n.key), len(n.value)) for n in sample.needles} == {(2, 4)}
    assert len(sample.needles) == 3


def test_running_out_of_keys_is_refused():
    with pytest.raises(ValueError, match="key_characters=1 gives 16 keys"):
        samples(1000, key_characters=1)


@pytest.mark.parametrize("option", ["words", "num_needles", "value_digits"])
def test_an_empty_needle_is_refused(option):
    with pytest.raises(ValueError, match=f"{option}=0"):
        samples(**{option: 0})


def test_a_depth_outside_the_text_is_refused():
    with pytest.raises(ValueError, match="percentages"):
        samples(depths=(101,))
