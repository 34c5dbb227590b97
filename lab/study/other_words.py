"""Asks a trained model for needles in other words, digit by digit.

    python -m lab.study.other_words --runs RUN_DIRECTORY ...

A model that is asked in unknown words may go on with text and say no digit at all, so that exact
match measures the form of the answer. Here it also chooses among the ten digits: the first digit
tells which number was found, and each further digit, given those before it, whether a number that
was found is continued. Every haystack has five needles, is read four times, each reading one write,
and starts from the memory that training left. Lines are added to `--out`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import environment_once
from benchmarks.options import parse
from fwpkm_jax.data import Tokenizer, load_tokenizer, needle_question
from fwpkm_jax.evaluation import NeedleConfig, Subject
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.sources import text_sources, texts_of
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.run import load_run
from fwpkm_jax.run.evaluate import subject_of
from lab.study.controls import OTHER_QUESTION, in_other_words
from lab.study.retention_facts import read_to_write, write_facts

WORDS = {
    "of training": needle_question("{key}"),
    "one word changed": "The secret code for ID-{key} is ",
    "words inserted": "The secret number for ID-{key}, as we know, is ",
    "another sentence": "Open locker {key} with ",
    "a longer sentence": OTHER_QUESTION,
}
"""What stands before a number, in the haystack and in the question."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Asks trained models for needles in the words of training and in others."""

    runs: tuple[Path, ...]
    """Directories of models that were trained on needles of bytes."""
    samples: int = 50
    """Haystacks in each wording, the same texts and numbers in all."""
    haystack_words: int = 56
    """Words of a haystack without its needles."""
    readings: int = 4
    """How often a haystack is read."""
    out: Path = Path("lab/results/other_words_cpu.jsonl")
    """File of the results, which are added to."""


def told(
    subject: Subject, tokenizer: Tokenizer, samples: Sequence[NeedleSample], readings: int
) -> Memory:
    """The memories `[samples, ...]` after each has read its haystack."""
    memory = jax.tree.map(lambda x: jnp.repeat(x[:1], len(samples), axis=0), subject.memory)
    texts = [tokenizer.encode(sample.haystack) for sample in samples]
    for _ in range(readings):
        read = read_to_write(subject.model, memory, max(map(len, texts)), texts)
        memory = write_facts(subject.model, memory, read)
    return memory


@nnx.jit
def _logits(model: LanguageModel, tokens: jax.Array, memory: Memory) -> jax.Array:
    return model(tokens, memory, write=False).logits


def answers(
    model: LanguageModel, memory: Memory, tokenizer: Tokenizer, samples: Sequence[NeedleSample]
) -> tuple[list[bool], list[list[int]]]:
    """Whether each free answer is right, and each digit that is chosen among the ten.

    Every digit is predicted from the right ones before it. A free answer, which is greedy, is right
    if each of these predictions is right among all tokens.
    """
    questions = [tokenizer.encode(sample.question) for sample in samples]
    numbers = np.stack([tokenizer.encode(sample.answer) for sample in samples])
    longest = max(map(len, questions)) + numbers.shape[1]
    rows = np.zeros((len(samples), longest), np.int32)
    for row, question, number in zip(rows, questions, numbers, strict=True):
        row[: len(question)] = question
        row[len(question) : len(question) + len(number)] = number
    logits = np.asarray(_logits(model, jnp.asarray(rows), memory))
    of_digits = np.array([tokenizer.encode(digit)[0] for digit in "0123456789"])
    exact, digits = [], []
    for found, question, number in zip(logits, questions, numbers, strict=True):
        found = found[len(question) - 1 :][: len(number)]
        exact.append(bool((found.argmax(axis=-1) == number).all()))
        chosen = of_digits[found[:, of_digits].argmax(axis=-1)]
        digits.append([int(right) for right in chosen == number])
    return exact, digits


def measure(directory: Path, options: Options) -> Iterator[dict[str, Any]]:
    """The lines of one model, one for each wording."""
    run = load_run(directory)
    subject = subject_of(run, name=str(directory))
    tokenizer = load_tokenizer(subject.text.tokenizer)
    config = NeedleConfig(haystack_words=(options.haystack_words,), samples=options.samples)
    texts = list(texts_of(text_sources(subject.text), tokenizer))
    samples = take_samples(texts, config, words=options.haystack_words, seed=subject.seed)
    asked = [(name, options.readings) for name in WORDS] + [("of training", 0)]
    for name, readings in asked:
        shown = [in_other_words(sample, WORDS[name]) for sample in samples]
        memory = told(subject, tokenizer, shown, readings)
        exact, digits = answers(subject.model, memory, tokenizer, shown)
        about = {"run": directory.name, "words": name, "sentence": WORDS[name]}
        about |= {"readings": readings, "samples": len(shown)}
        yield about | {"exact": sum(exact), "digits": np.sum(digits, axis=0).tolist()}


def main(argv: Sequence[str] | None = None) -> int:
    """Adds the lines of each run to `--out`."""
    options = parse(Options, argv, description=__doc__)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for directory in options.runs:
        for line in measure(directory, options):
            print(line, flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"environment": environment_once()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
