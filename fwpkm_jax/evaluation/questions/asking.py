"""Questions about texts: read, answered with the memory writing and frozen, and scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fwpkm_jax.data import Tokenizer
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Outcome, Subject
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.option_checks import check_least
from fwpkm_jax.evaluation.readers.batch_reader import (
    BatchReader,
    MemoryReset,
    Prompt,
    passes_of,
)
from fwpkm_jax.evaluation.readers.prompts import encode_parts
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.yarn import with_yarn
from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.language_model import LanguageModel, Memory


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How texts that end with a question or a word to guess are read."""

    write: Literal["both", "on", "off"] = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    memory_reset: MemoryReset = "text"
    """text: every text starts from the checkpoint's memory. never: the memory goes on from text to
    text of a task and length; needs a batch size of 1."""
    batch_size: int = 8
    """Texts read side by side; each has its own copy of a memory that is written."""
    chunk_size: int | None = None
    """Tokens per write. None: the model's."""
    yarn_factor: float | None = None
    """YaRN's factor for rotary positions. None: positions as trained."""
    yarn_original_length: int = 1024
    """YaRN's original context length."""
    piece_length: int = 512
    """Tokens read per call; limits the device memory needed and does not change results."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_least(self, 1, "batch_size", "chunk_size", "piece_length")

    def stretched(self, model: LanguageModel) -> LanguageModel:
        """The model with YaRN as these options say."""
        return with_yarn(model, factor=self.yarn_factor, original_length=self.yarn_original_length)

    def reader(self, model: LanguageModel, memory: Memory, *, write: bool) -> BatchReader:
        """A reader of texts as these options say."""
        return BatchReader(
            model,
            memory,
            write=write,
            memory_reset=self.memory_reset,
            batch_size=self.batch_size,
            chunk_size=self.chunk_size,
            piece_length=self.piece_length,
        )


class Question(NamedTuple):
    """A text, a question about it, and the right answers."""

    context: str
    """What is read, and written to its end, before the question."""
    question: str
    """The rest of the prompt; not empty."""
    references: tuple[str, ...]
    """The answers that `Group.score` compares with."""
    id: str = ""


class Group(NamedTuple):
    """Questions of one kind, whose scores are averaged."""

    task: str
    length: int | None
    """Tokens that were asked for; None: as the data are."""
    questions: Sequence[Question]
    max_new_tokens: int
    score: Callable[[Question, str], float]
    """The score of an answer, from 0 to 1."""
    ended: Callable[[str], bool] = lambda answer: False
    """Whether an answer so far needs no further token."""
    max_tokens: int | None = None
    """Longer prompts lose their middle. None: read whole."""


def ask(
    subject: Subject,
    config: ReadingOptions,
    groups: Sequence[Group],
    *,
    tokenizer: Tokenizer,
    name: str,
    files: Mapping[str, str],
) -> Outcome:
    """Scores of greedy answers by group, with the memory writing and frozen.

    Every group starts from the checkpoint's memory. Tokens that still wait in the queue at the end
    of a text are written before its question is read.

    Args:
      subject: the model and its memory, of which the first group is used.
      config: how texts are read.
      groups: the questions; none is empty.
      tokenizer: the model's.
      name: of the evaluation, for messages.
      files: SHA-256 of the files that the questions come from, by path.

    Returns:
      Numbers are `runs`, one row per group: `task`, `length`, `questions`, `tokens` of the prompts,
      under `writing` and `frozen` the mean `score` with its 95 % `interval`, their `difference`
      likewise, and `samples`: for each question its id, references, answers and scores.

    Raises:
      ValueError: the memory cannot be read this way, or a log-probability is not finite.
    """
    model = config.stretched(subject.model)
    began, runs, scored = time.monotonic(), [], 0
    passes = passes_of(config.write)
    total = sum(len(group.questions) for group in groups) * len(passes)
    forecast = Forecast(name, total=total, unit="questions")
    stop_ids = [token for token in tokenizer.stop_ids if token < model.config.vocab_size]
    for group in groups:
        prompts = [_encode(one, tokenizer, group.max_tokens) for one in group.questions]
        answers: dict[str, list[str]] = {}
        for which, write in passes:
            reader = config.reader(model, subject.memory, write=write)
            ended = group.ended
            tokens = reader.answers(
                prompts,
                max_new_tokens=group.max_new_tokens,
                stop_ids=stop_ids,
                vocab_size=tokenizer.vocab_size,
                ended=lambda tokens, ended=ended: ended(tokenizer.decode(tokens)),
                done=forecast.add,
            )
            scored += sum(map(len, tokens))
            answers[which] = [tokenizer.decode(one) for one in tokens]
        runs.append(_row(group, prompts, answers))
    return Outcome(
        numbers={"runs": runs, "seconds": time.monotonic() - began},
        scored_tokens=scored,
        files=files,
        mode="greedy answers; the text is written to its end before the question",
        resets=describe_resets(
            subject.memory,
            fast_weights="text" if config.memory_reset == "text" else "task",
            queue="text",
            caches="text",
        ),
        chunk_size=config.chunk_size,
        model=model,
    )


def _encode(question: Question, tokenizer: Tokenizer, most: int | None) -> Prompt:
    context, rest = encode_parts(question.context, question.question, tokenizer)
    if not len(rest):  # The last token of the text is its question, too.
        context, rest = context[:-1], context[-1:]
    size = len(context) + len(rest)
    if most is not None and size > most:
        first, last = most - most // 2, most // 2
        whole = np.concatenate([context, rest])
        kept = np.concatenate([whole[:first], whole[size - last :]])
        cut = min(max(len(kept) - len(rest), 0), len(kept) - 1)
        context, rest = kept[:cut], kept[cut:]
    return Prompt(context, rest)


def _row(
    group: Group, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    scores = {
        which: np.array(
            [group.score(one, text) for one, text in zip(group.questions, texts, strict=True)]
        )
        for which, texts in answers.items()
    }
    lengths = [len(prompt.context) + len(prompt.question) for prompt in prompts]
    row: dict[str, Any] = {
        "task": group.task,
        "length": group.length,
        "questions": len(prompts),
        "tokens": {"min": min(lengths), "mean": float(np.mean(lengths)), "max": max(lengths)},
        **{which: mean_score(one) for which, one in scores.items()},
    }
    if len(scores) == 2:
        row["difference"] = mean_score(scores["writing"] - scores["frozen"])
    row["samples"] = [
        {
            "id": one.id,
            "references": list(one.references),
            "answers": {which: texts[number] for which, texts in answers.items()},
            "scores": {which: float(found[number]) for which, found in scores.items()},
        }
        for number, one in enumerate(group.questions)
    ]
    return row


def mean_score(scores: np.ndarray) -> dict[str, Any]:
    """The mean of scores `[questions]` with its 95 % interval, None for a single one."""
    mean, interval = clustered_mean(scores.astype(np.float64), np.ones(len(scores)))
    return {"score": mean, "interval": interval}
