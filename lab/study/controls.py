"""Controls of the study: reads taken out, needles in another sentence, gates at their digits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from fwpkm_jax.data import NeedleMix, load_tokenizer, make_dataset, needle_question
from fwpkm_jax.evaluation import NeedleConfig, Subject
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.readers.document_reader import read_document
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.reconfigure import with_rule
from fwpkm_jax.evaluation.record import first_group
from fwpkm_jax.evaluation.sources import text_sources, texts_of
from fwpkm_jax.rules import FwPKM

OTHER_QUESTION = "Whoever owns locker {key} opens it with the code "
"""Words that no needle in training has, in front of a number."""
PLACES = ("text", "stated", "answers")
"""Of a byte: in text or a sentence's words, a digit that is stated, a digit that is an answer."""
BINS = 10


def without_reads(subject: Subject) -> Subject:
    """The subject with all slots at zero: what a frozen FwPKM reads of them is zero.

    Raises:
      ValueError: the model's memory is no FwPKM.
    """
    _require_fwpkm(subject)
    memory = {
        layer: one._replace(values=jnp.zeros_like(one.values))
        for layer, one in subject.memory.items()
    }
    return replace(subject, memory=memory)


def with_still_keys(subject: Subject) -> Subject:
    """The subject with a write that moves values and no keys.

    Raises:
      ValueError: the model's memory is no FwPKM.
    """
    rule = replace(_require_fwpkm(subject), addressing_weight=0.0)
    model, memory = with_rule(subject.model, subject.memory, rule)
    return replace(subject, model=model, memory=memory)


def _require_fwpkm(subject: Subject) -> FwPKM:
    rule = subject.model.config.fast_weight.rule
    if not (subject.memory and isinstance(rule, FwPKM)):
        raise ValueError(f"memory of {type(rule).__name__}: only FwPKM has slots and keys.")
    return rule


def in_other_words(sample: NeedleSample, question_of: str = OTHER_QUESTION) -> NeedleSample:
    """The sample with other words, which name the `{key}`, before its numbers."""
    haystack, question = sample.haystack, sample.question
    for needle in sample.needles:
        ours, others = needle_question(needle.key), question_of.format(key=needle.key)
        haystack, question = haystack.replace(ours, others), question.replace(ours, others)
    return sample._replace(haystack=haystack, question=question)


def other_needles(subject: Subject, *, words: int, samples: int) -> list[NeedleSample]:
    """The samples of the needle evaluation of that length in other words."""
    tokenizer = load_tokenizer(subject.text.tokenizer)
    config = NeedleConfig(haystack_words=(words,), samples=samples)
    texts = texts_of(text_sources(subject.text), tokenizer)
    built = take_samples(texts, config, words=words, seed=subject.seed)
    return [in_other_words(sample) for sample in built]


def gates_at_needles(subject: Subject, *, rows: int) -> dict[str, Any]:
    """Gates where digits of needles are stated, where they are answers, and elsewhere.

    Rows of unseen text with needles, made as in training, are read one after the other with the
    memory written. A byte counts for the gate at the position that predicts it.

    Args:
      subject: a model with memory layers, trained on needles in three quarters of its rows.
      rows: rows to read.

    Returns:
      By layer and place (`stated`, `answers`, `text`): the mean, the number of bytes, and the
      histogram, counts in ten bins from 0 to 1.
    """
    length = subject.text.length
    reader = StreamReader(
        subject.model, first_group(subject.memory), write=True, piece_length=length
    )
    found: dict[str, dict[str, list[np.ndarray]]] = {}
    for tokens, place in itertools.islice(_rows(subject), rows):
        (reading,) = read_document(reader, tokens, segment_length=length)
        _, gates, _ = reading.fetch()
        for layer, gate in gates.items():
            of = found.setdefault(layer, {name: [] for name in PLACES})
            for number, name in enumerate(PLACES):
                of[name].append(gate[place == number])
    return {
        layer: {name: _described(np.concatenate(parts)) for name, parts in of.items()}
        for layer, of in found.items()
    }


def _described(gates: np.ndarray) -> dict[str, Any]:
    counts, _ = np.histogram(gates, bins=BINS, range=(0.0, 1.0))
    return {"mean": float(gates.mean()), "bytes": gates.size, "histogram": counts.tolist()}


def _rows(subject: Subject) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows `[length + 1]` with needles, and the place of each label as its number in `PLACES`."""
    mix = subject.text.needles or NeedleMix()
    # Weights tell the bytes of sentences and the answers apart from the text, whose weight is 1.
    marked = replace(mix, share=1.0, answer_weight=3.0, sentence_weight=2.0)
    plain = replace(subject.text, needles=None)
    rows = make_dataset(plain, split="valid", batch_size=1, seed=subject.seed)
    for number, row in enumerate(rows):
        example = {name: row[name][0] for name in ("tokens", "loss_weight")}
        example = marked.hide(example, rng=np.random.default_rng([subject.seed, number]))
        weights = example["loss_weight"]
        yield example["tokens"], np.select([weights == 3, _stated(example)], [2, 1], 0)


def _stated(example: dict[str, np.ndarray]) -> np.ndarray:
    """Where a label is a digit of a needle's number that is no answer.

    A number ends with the sentence's full stop, and its key stands before `is`.
    """
    labels, weights = example["tokens"][1:], example["loss_weight"]
    sentence = "".join(map(chr, np.where(weights == 2, labels, 0)))
    stated = np.zeros(len(labels), bool)
    for number in re.finditer(r"(?<= is )[0-9]+(?=\.)", sentence):
        stated[slice(*number.span())] = True
    return stated
