"""Needle in a haystack: read a text n times, then answer from memory.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.3; Figures 4 and 10.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fwpkm_jax.data import TextData, Tokenizer, load_tokenizer
from fwpkm_jax.evaluation import plots, tables
from fwpkm_jax.evaluation.haystack_reader import HaystackReader
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.intervals import wilson
from fwpkm_jax.evaluation.needle_samples import NeedleSample, build_samples
from fwpkm_jax.evaluation.record import Origin, Result, make_result, one_group
from fwpkm_jax.evaluation.sources import missing_text, text_sources
from fwpkm_jax.evaluation.yarn import with_yarn
from fwpkm_jax.models.language_model import LanguageModel, Memory

logger = logging.getLogger(__name__)

_DEPTH_BINS = 10


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Needle in a haystack."""

    data: tuple[str, ...] = ()
    """Files or folders of text for the haystacks. Empty: the run's validation text."""
    haystack_words: tuple[int, ...] = (4000,)
    """Whitespace words of a haystack; each length is an evaluation of its own."""
    readings: tuple[int, ...] = (1, 2, 3, 4)
    """How often the haystack is read before the answer; each number starts afresh."""
    samples: int = 500
    """Haystacks per length, fewer where the text runs out."""
    mode: Literal["paper", "reference"] = "paper"
    """paper: the last reading is written, then the question is read. reference: the question is
    read together with the haystack, before the write, as in the release."""
    write: bool = True
    """Write the readings into the memory. Off: it stays as the checkpoint has it."""
    reset_memory_between_samples: bool = False
    """Each sample starts from the checkpoint's memory. Off, as in paper and release: what earlier
    samples wrote stays, their needles too."""
    num_needles: int = 5
    """Needles per haystack, one of which is asked for."""
    key_characters: int = 4
    """Hexadecimal characters of a needle's key."""
    value_digits: int = 6
    """Digits of a needle's number, and tokens decoded for an answer."""
    depths: tuple[float, ...] = ()
    """Depths in percent that targets take turns at. Empty: uniform over the haystack."""
    yarn_factor: float | None = None
    """Stretches rotary positions. The paper: 4 for 8K words, 8 for 16K, 16 for 32K, 64 for 128K.
    None: as trained."""
    yarn_original_length: int = 1024
    """Original context of the stretching; the release says 1024 though it trained on 4096."""
    piece_length: int = 512
    """Tokens read per call; bounds the memory needed and changes no number."""

    def __post_init__(self) -> None:
        for name in ("haystack_words", "readings"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"{name}={values} must name numbers of at least 1.")
        for name in ("samples", "num_needles", "key_characters", "value_digits", "piece_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if any(not 0 <= depth <= 100 for depth in self.depths):
            raise ValueError(f"depths={self.depths} must be percentages from 0 to 100.")


class Prompt(NamedTuple):
    """A sample as token ids."""

    haystack: np.ndarray
    question: np.ndarray


def needle_accuracy(
    model: LanguageModel,
    memory: Memory,
    *,
    config: NeedleConfig,
    texts: Callable[[], Iterable[tuple[str, str]]],
    tokenizer: Tokenizer,
    seed: int = 0,
    origin: Origin | None = None,
) -> Result:
    """How often a number hidden in a text is told after reading the text n times.

    Args:
      model: the language model.
      memory: fast weights to start from; with several groups the first is taken.
      config: the protocol.
      texts: starts a pass over pairs of id and text.
      tokenizer: the model's.
      seed: of the samples.
      origin: of weights and texts, for the record.

    Returns:
      `results` holds a row per length and number of readings under `runs`: `exact` (share, with
      interval), `digits` (mean digits right), `candidate` (share of answers that are the number of
      any needle of the sample), `by_depth`, `token_length`, and each sample's answer.

    Raises:
      ValueError: the texts give no sample of a length.
    """
    model = with_yarn(model, factor=config.yarn_factor, original_length=config.yarn_original_length)
    start, groups = one_group(memory)
    runs = []
    for words in config.haystack_words:
        samples = _samples(texts(), config, words=words, seed=seed)
        prompts = [encode_prompt(sample, tokenizer) for sample in samples]
        reader = HaystackReader(
            model,
            start,
            capacity=_capacity(prompts, config, model.config.fast_weight.rule.lookahead),
            max_length=max(len(p.haystack) + len(p.question) for p in prompts)
            + config.value_digits,
            piece_length=config.piece_length,
            vocab_size=tokenizer.vocab_size,
            write=config.write,
        )
        for readings in config.readings:
            answers = _answer_all(reader, prompts, tokenizer, config, readings=readings)
            runs.append(
                {"words": words, "readings": readings, **score_answers(samples, answers)}
                | {"token_length": _spread([len(p.haystack) for p in prompts])}
            )
    return make_result(
        "needle",
        model=model,
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=config.value_digits * sum(run["exact"]["answers"] for run in runs),
        mode=config.mode,
        chunk_size="one write per reading, all waiting tokens",
        resets={
            "memory": "sample" if config.reset_memory_between_samples else "never",
            "queue": "sample" if config.reset_memory_between_samples else "never",
            "attention_and_gdn": "reading",
            "memory_group_used": 0 if groups else None,
        },
        results={"runs": runs},
    )


def encode_prompt(sample: NeedleSample, tokenizer: Tokenizer) -> Prompt:
    """Token ids of haystack and question, which are encoded together, as they are read.

    The haystack's tokens are those that do not depend on the question behind it.
    """
    whole = tokenizer.encode(sample.haystack + sample.question)
    alone = tokenizer.encode(sample.haystack)
    shorter = min(len(alone), len(whole))
    differing = np.flatnonzero(alone[:shorter] != whole[:shorter])
    cut = int(differing[0]) if len(differing) else shorter
    return Prompt(whole[:cut], whole[cut:])


def score_answers(samples: Sequence[NeedleSample], answers: Sequence[str]) -> dict[str, Any]:
    """Exact, digit and candidate match of decoded answers, all together and by depth."""
    records = []
    for sample, answer in zip(samples, answers, strict=True):
        digits = sum(a == b for a, b in zip(answer, sample.answer, strict=False))
        records.append(
            {
                "answer": answer,
                "expected": sample.answer,
                "exact": answer.strip() == sample.answer,
                "digits": digits,
                "candidate": answer in [needle.value for needle in sample.needles],
                "depth": sample.depth,
                "words": sample.words,
                "document": sample.document,
            }
        )
    by_depth = []
    for bin_index in range(_DEPTH_BINS):
        inside = [r for r in records if _depth_bin(r["depth"]) == bin_index]
        if inside:
            low, high = (100 * (bin_index + side) / _DEPTH_BINS for side in (0, 1))
            by_depth.append({"from": low, "to": high, **_share(inside, "exact")})
    return {
        "exact": _share(records, "exact"),
        "digits": float(np.mean([r["digits"] for r in records])),
        "candidate": _share(records, "candidate"),
        "by_depth": by_depth,
        "samples": records,
    }


def _samples(
    texts: Iterable[tuple[str, str]], config: NeedleConfig, *, words: int, seed: int
) -> list[NeedleSample]:
    samples = build_samples(
        texts,
        words=words,
        seed=seed,
        num_needles=config.num_needles,
        key_characters=config.key_characters,
        value_digits=config.value_digits,
        depths=config.depths,
    )
    samples = list(itertools.islice(samples, config.samples))
    if not samples:
        raise ValueError(
            f"No text has the {-(-words // 2)} words that a haystack of {words} needs at least; "
            "lower haystack_words or give longer texts."
        )
    if len(samples) < config.samples:
        logger.warning("The text gives %d haystacks of %d words.", len(samples), words)
    return samples


def _capacity(prompts: Sequence[Prompt], config: NeedleConfig, lookahead: int) -> int:
    """Tokens that one write may have to hold: a whole prompt, and what the sample before left."""
    longest = max(len(p.haystack) + len(p.question) for p in prompts)
    question = max(len(p.question) for p in prompts)
    return longest + lookahead + question + config.value_digits


def _answer_all(
    reader: HaystackReader,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    config: NeedleConfig,
    *,
    readings: int,
) -> list[str]:
    reader.reset_memory()
    answers: list[str] = []
    shown = time.monotonic()
    for number, prompt in enumerate(prompts):
        if number and config.reset_memory_between_samples:
            reader.reset_memory()
        for _ in range(readings - 1):
            reader.restart()
            reader.read(prompt.haystack)
            reader.write()
        reader.restart()
        reader.read(prompt.haystack)
        if config.mode == "paper":
            reader.write()
        reader.read(prompt.question)
        # The next token is chosen before the write in either mode; the release writes here.
        answer = reader.next_token()
        if config.mode == "reference":
            reader.write()
        answers.append(tokenizer.decode(reader.decode(answer, length=config.value_digits)))
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            logger.info("needle, %d readings: %d of %d", readings, number + 1, len(prompts))
    return answers


def _depth_bin(depth: float) -> int:
    return min(int(depth / 100 * _DEPTH_BINS), _DEPTH_BINS - 1)


def _share(records: Sequence[dict[str, Any]], field: str) -> dict[str, Any]:
    right = sum(record[field] for record in records)
    return {
        "accuracy": right / len(records),
        "interval": wilson(right, len(records)),
        "answers": len(records),
    }


def _spread(lengths: Sequence[int]) -> dict[str, float]:
    return {"min": min(lengths), "mean": float(np.mean(lengths)), "max": max(lengths)}


def _run(subject: Subject, config: NeedleConfig) -> Result:
    assert isinstance(subject.data, TextData)  # Other data are refused before.
    tokenizer = load_tokenizer(subject.data.tokenizer)
    sources = text_sources(subject.data, config.data)

    def texts() -> Iterable[tuple[str, str]]:
        for source in sources:
            for document in source.documents():
                yield document.id, tokenizer.decode(document.tokens)

    return needle_accuracy(
        subject.model,
        subject.memory,
        config=config,
        texts=texts,
        tokenizer=tokenizer,
        seed=subject.seed,
        origin=dataclasses.replace(
            subject.origin,
            files={path: digest for source in sources for path, digest in source.files.items()},
            tokenizer=tokenizer.fingerprint,
        ),
    )


NEEDLE = Evaluation(
    config=NeedleConfig,
    data=TextData,
    limit="samples",
    in_default_suite=False,  # Small models of text cannot follow the question.
    run=_run,
    table=tables.needle_table,
    plot=plots.plot_needle,
    missing=lambda subject, config: missing_text(subject.data, config.data),
)
