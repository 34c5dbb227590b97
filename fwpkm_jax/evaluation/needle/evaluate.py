"""The needle evaluation: every length and number of readings, scored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.display import findings, tables
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.needle.files import read_samples, texts_of
from fwpkm_jax.evaluation.needle.plots import plot_needle
from fwpkm_jax.evaluation.needle.reading import answer_each, encode_prompt, open_reader
from fwpkm_jax.evaluation.needle.samples import NeedleSample, take_samples
from fwpkm_jax.evaluation.needle.scores import score_answers
from fwpkm_jax.evaluation.record import Origin, Result, describe_resets, first_group, make_result
from fwpkm_jax.evaluation.sources import file_hashes, missing_text, text_sources
from fwpkm_jax.evaluation.yarn import with_yarn
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.config import ModelConfig, own_memory
from fwpkm_jax.models.language_model import LanguageModel, Memory


def needle_accuracy(
    model: LanguageModel,
    memory: Memory,
    *,
    config: NeedleConfig,
    texts: Callable[[], Iterable[tuple[str, str]]],
    tokenizer: Tokenizer,
    seed: int = 0,
    origin: Origin | None = None,
    partition: Partition | None = None,
) -> Result:
    """How often the model answers with a number hidden in a text that it has read n times.

    Args:
      model: the language model.
      memory: fast weights to start from, leaves `[groups, ...]`; the first group is used.
      config: the protocol.
      texts: starts a pass over pairs of id and text; not called if `config.sample_files` are given.
      tokenizer: the model's tokenizer.
      seed: seed of the samples.
      origin: provenance of weights and texts, for the record.
      partition: devices that each read a part of every piece of text (`mesh.sequence`); None: one.

    Returns:
      `results` holds under `runs` one row per length and number of readings: `words`, `readings`,
      `sample_seed`, `yarn_factor`, `token_length` and the fields of `score_answers`; shares have
      95 % intervals.

    Raises:
      ValueError: the texts give no sample of a length, or a file does not hold samples.
    """
    start = first_group(memory)
    stretched, runs = model, []
    forecast = Forecast("needle", total=_words_to_read(config), unit="words")
    for words, sample_seed, samples in _each_length(config, texts, seed):
        # A text may give fewer samples than requested.
        forecast.total += (len(samples) - config.samples) * words * sum(config.readings)
        factor = config.factor(words)
        stretched = with_yarn(model, factor=factor, original_length=config.yarn_original_length)
        prompts = [encode_prompt(sample, tokenizer) for sample in samples]
        reader = open_reader(stretched, start, prompts, config, tokenizer, partition=partition)
        for readings in config.readings:
            answers = []
            for answer in answer_each(reader, prompts, tokenizer, config, readings=readings):
                answers.append(answer)
                forecast.add(words * readings)
            runs.append(
                {
                    "words": words,
                    "readings": readings,
                    "sample_seed": sample_seed,
                    "yarn_factor": factor,
                    "token_length": _spread([len(p.haystack) for p in prompts]),
                    **score_answers(samples, answers),
                }
            )
    kept = "sample" if config.reset_memory_between_samples else "never"
    return make_result(
        "needle",
        model=stretched,  # The last length's; each run holds its YaRN factor.
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=config.value_digits * sum(run["exact"]["answers"] for run in runs),
        mode=config.mode,
        chunk_size=describe_chunks(model.config, config),
        resets=describe_resets(
            memory,
            fast_weights="reading" if own_memory(model.config) else kept,
            queue=kept,
            caches="reading",
        ),
        results={"runs": runs},
        fast_weight_dtype=config.fast_weight_dtype,
    )


def describe_chunks(model: ModelConfig, config: NeedleConfig) -> str | int:
    """Tokens per write, as a number or a description, for the record."""
    own = own_memory(model)
    if own is not None:
        return (
            f"{own.chunk_size}, {own.name}'s own: it has no override, and its memory starts anew "
            "at each reading"
        )
    if not model.memory_layers:
        return "nothing is written: the model has no memory"
    if config.chunk_size == "text":
        return "one write per reading, all waiting tokens"
    if config.chunk_size == "model":
        return model.fast_weight.chunk_size
    return config.chunk_size


def _words_to_read(config: NeedleConfig) -> int:
    """Words of all readings of all samples, if every length gives enough samples."""
    lengths = config.haystack_words
    if config.sample_files:
        lengths = [read_samples(path)[0]["words"] for path in config.sample_files]
    return config.samples * sum(lengths) * sum(config.readings)


def _each_length(
    config: NeedleConfig, texts: Callable[[], Iterable[tuple[str, str]]], seed: int
) -> Iterator[tuple[int, int, Sequence[NeedleSample]]]:
    """Words, seed and samples of each length."""
    for path in config.sample_files:
        header, samples = read_samples(path)
        yield header["words"], header["seed"], list(itertools.islice(samples, config.samples))
    for words in () if config.sample_files else config.haystack_words:
        yield words, seed, take_samples(texts(), config, words=words, seed=seed)


def _spread(lengths: Sequence[int]) -> dict[str, float]:
    return {"min": min(lengths), "mean": float(np.mean(lengths)), "max": max(lengths)}


def _run(subject: Subject, config: NeedleConfig) -> Result:
    tokenizer = load_tokenizer(subject.text.tokenizer)
    if config.sample_files:
        sources = []
        hashes = [file_hashes(path) for path in config.sample_files]
    else:
        sources = text_sources(subject.text, config.data)
        hashes = [source.files for source in sources]
    return needle_accuracy(
        subject.model,
        subject.memory,
        config=config,
        texts=lambda: texts_of(sources, tokenizer),
        tokenizer=tokenizer,
        seed=subject.seed,
        origin=subject.origin_of(hashes, tokenizer),
        partition=subject.partition,
    )


def _missing(subject: Subject, config: NeedleConfig) -> str | None:
    absent = [path for path in config.sample_files if not Path(path).is_file()]
    if absent:
        return f"the file {absent[0]}"
    return None if config.sample_files else missing_text(subject.text, config.data)


NEEDLE = Evaluation(
    config=NeedleConfig,
    data="text",
    limit="samples",
    in_default_suite=False,  # Small models of text cannot follow the question.
    run=_run,
    table=tables.needle_table,
    plot=plot_needle,
    title="Needle in a haystack",
    about=(
        "Sentences with a secret number are hidden in a long text; the model reads the text one or "
        "more times and is asked for one of the numbers. An answer counts if all its digits are "
        "right; where more readings give more right answers, the memory was filled by reading."
    ),
    finding=findings.needle_finding,
    missing=_missing,
)
