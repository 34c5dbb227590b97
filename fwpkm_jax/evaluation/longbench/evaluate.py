"""LongBench: perplexity of the answers to questions about long texts that the memory has read.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.4, Figure 5.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.data.longbench import MAX_TOKENS, TASKS, read_samples
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.longbench.views import (
    longbench_finding,
    longbench_table,
    plot_longbench,
)
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype, as_stored
from fwpkm_jax.evaluation.readers.haystack_reader import HaystackReader
from fwpkm_jax.evaluation.record import Origin, Result, describe_resets, first_group, make_result
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.evaluation.yarn import with_yarn
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import check_literals
from fwpkm_jax.models.config import ModelConfig, own_memory
from fwpkm_jax.models.language_model import LanguageModel, Memory

_LEAST_ROOM = 1024  # Smallest capacity of a reader in tokens; larger ones are 4 times as large.


@dataclass(frozen=True, kw_only=True)
class LongBenchConfig:
    """LongBench answer perplexity."""

    data: str | None = None
    """LongBench's data.zip, or a folder of TASK.jsonl files."""
    tasks: tuple[str, ...] = TASKS
    """Tasks; each starts from the checkpoint's memory."""
    write: Literal["both", "on", "off"] = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    memory_reset: Literal["task", "sample"] = "task"
    """When fast weights are reset to the checkpoint's: before each task, or before each sample."""
    max_samples: int | None = None
    """Samples scored of each task at most."""
    max_tokens: int = MAX_TOKENS
    """Longest sample; counts context, question and the longest answer. Longer ones are left out."""
    yarn_factor: float | None = 20.0
    """YaRN's factor for rotary positions, in every sample. None: positions as trained."""
    yarn_original_length: int = 1024
    """YaRN's original context length; the release uses 1024 although it trained on 4096."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Memory precision between samples; bfloat16 rounds it after each, as the release does."""
    piece_length: int = 512
    """Tokens read per call; limits the device memory needed and does not change results."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.tasks or set(self.tasks) - set(TASKS) or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={self.tasks} must be distinct names among {', '.join(TASKS)}.")
        for name in ("max_samples", "max_tokens", "piece_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")


class QuestionTokens(NamedTuple):
    """A sample as token ids; each part is tokenised separately."""

    id: str
    context: np.ndarray
    question: np.ndarray
    answer: np.ndarray


def longbench_perplexity(
    model: LanguageModel,
    memory: Memory,
    *,
    config: LongBenchConfig,
    samples: Mapping[str, Sequence[QuestionTokens]],
    seed: int = 0,
    origin: Origin | None = None,
    partition: Partition | None = None,
) -> Result:
    """Perplexity of all answer tokens of each task, and the effect of writing on it.

    A sample is read in one pass from empty caches. The memory is written as soon as the context and
    `lookahead` tokens after it were read: the pairs of the context are complete then,
    and all later tokens read the written memory. FwMLP keeps its chunk size, because one step on a
    whole text makes its weights NaN.

    Args:
      model: the language model.
      memory: fast weights that every task starts from, leaves `[groups, ...]`; the first group is
        used.
      config: the protocol; data, tasks and limits have been applied to `samples`.
      samples: samples by task, in reading order.
      seed: the run's seed, for the record; there are no random draws.
      origin: provenance of weights and texts, for the record.
      partition: devices that each read a part of every piece of text (`mesh.sequence`); None: one.

    Returns:
      `results` holds `tasks` (samples, their lengths, answer tokens) and, by task, loss in nats and
      perplexity under `writing` and `frozen`, and under `difference` the loss of writing minus
      frozen with a 95 % interval over samples. Arrays hold each answer token's task, sample,
      position and losses.

    Raises:
      ValueError: a mixer's memory is reset for each sequence, or a task has no sample.
    """
    if unsuited := _unsuited(model.config):
        raise ValueError(f"LongBench: {unsuited}.")
    for task, chosen in samples.items():
        if not chosen:
            raise ValueError(f"LongBench: no sample of {task} is left; raise max_tokens.")
    model = with_yarn(model, factor=config.yarn_factor, original_length=config.yarn_original_length)
    start = first_group(memory)
    began = time.monotonic()
    writes = {"both": (True, False), "on": (True,), "off": (False,)}[config.write]
    tokens = sum(_num_tokens(sample) for chosen in samples.values() for sample in chosen)
    forecast = Forecast("longbench", total=tokens * len(writes), unit="tokens")
    passes = {
        "writing" if write else "frozen": {
            task: _read_task(
                *(model, start, chosen, config, forecast), write=write, partition=partition
            )
            for task, chosen in samples.items()
        }
        for write in writes
    }
    results: dict[str, Any] = {
        "tasks": {task: _describe(chosen) for task, chosen in samples.items()},
        **{
            name: {task: _score(losses) for task, losses in one.items()}
            for name, one in passes.items()
        },
    }
    if len(passes) == 2:
        results["difference"] = {
            task: _difference(passes["writing"][task], passes["frozen"][task]) for task in samples
        }
    results["seconds"] = time.monotonic() - began
    keeps_chunks = not model.config.fast_weight.rule.long_writes
    return make_result(
        "longbench",
        model=model,
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=sum(one["answer_tokens"] for one in results["tasks"].values()),
        mode="one pass over context, question and answer",
        chunk_size=None if keeps_chunks else "the context block of each sample",
        resets=describe_resets(
            memory, fast_weights=config.memory_reset, queue="sample", caches="sample"
        ),
        fast_weight_dtype=config.fast_weight_dtype,
        results=results,
        arrays=_arrays(samples, passes),
    )


def tokenize_task(config: LongBenchConfig, task: str, tokenizer: Tokenizer) -> list[QuestionTokens]:
    """The samples of a task within the limits, as tokens of context, question and first answer."""
    assert config.data is not None
    found = (
        QuestionTokens(
            sample.id,
            tokenizer.encode(sample.context),
            tokenizer.encode(sample.question),
            tokenizer.encode(sample.answers[0]),
        )
        for _, sample in read_samples(config.data, task)
        if sample is not None and sample.num_tokens(tokenizer) <= config.max_tokens
    )
    return list(itertools.islice((one for one in found if len(one.answer)), config.max_samples))


def read_sample(
    model: LanguageModel,
    memory: Memory,
    sample: QuestionTokens,
    *,
    piece_length: int,
    write: bool,
    partition: Partition | None = None,
) -> tuple[np.ndarray, Memory]:
    """The losses of a sample's answer tokens in nats, `[answer tokens]`, and the memory after it.

    Args:
      model: the language model.
      memory: fast weights, leaves `[1, ...]`; their buffers are not reused.
      sample: the tokens.
      piece_length: tokens read per call.
      write: False disables writing.
      partition: devices that share the reading; None: one.
    """
    tokens = np.concatenate([sample.context, sample.question, sample.answer])
    inputs, labels = tokens[:-1], tokens[1:]
    room = _LEAST_ROOM
    while room < len(inputs):
        room *= 4  # Few sizes, because each size is compiled separately.
    rule, chunk_size = model.config.fast_weight.rule, model.config.fast_weight.chunk_size
    keeps_chunks = not rule.long_writes
    reader = HaystackReader(
        model,
        memory,
        capacity=room,
        max_length=room,
        piece_length=piece_length,
        vocab_size=model.config.vocab_size,
        write=write,
        chunk_size=chunk_size if keeps_chunks else "flush",
        partition=partition,
    )
    num_context = len(sample.context)
    due = () if keeps_chunks else range(num_context + rule.lookahead, len(inputs) + 1, num_context)
    first = num_context + len(sample.question) - 1  # Its label is the first answer token.
    losses, at = [], 0
    for end in sorted({first, *due, len(inputs)}):
        part = slice(at, end)
        if at < first:
            reader.read(inputs[part])
        else:
            losses.append(reader.score(inputs[part], labels[part]))
        if end in due:
            reader.write()
        at = end
    return np.concatenate(losses), reader.stream.memory


def _read_task(
    model: LanguageModel,
    start: Memory,
    samples: Sequence[QuestionTokens],
    config: LongBenchConfig,
    forecast: Forecast,
    *,
    write: bool,
    partition: Partition | None,
) -> list[np.ndarray]:
    """Each sample's losses in nats, `[answer tokens]`."""
    memory = start = as_stored(start, config.fast_weight_dtype)
    losses = []
    for sample in samples:
        loss, memory = read_sample(
            *(model, memory, sample),
            piece_length=config.piece_length,
            write=write,
            partition=partition,
        )
        memory = as_stored(memory, config.fast_weight_dtype)
        if config.memory_reset == "sample":
            memory = start
        losses.append(loss)
        forecast.add(_num_tokens(sample))
    return losses


def _num_tokens(sample: QuestionTokens) -> int:
    return len(sample.context) + len(sample.question) + len(sample.answer)


def _score(losses: Sequence[np.ndarray]) -> dict[str, float]:
    loss = float(np.mean(np.concatenate(losses), dtype=np.float64))
    return {"loss": loss, "perplexity": float(np.exp(loss))}


def _difference(writing: Sequence[np.ndarray], frozen: Sequence[np.ndarray]) -> dict[str, Any]:
    sums = [np.sum(on - off, dtype=np.float64) for on, off in zip(writing, frozen, strict=True)]
    sizes = [len(on) for on in writing]
    mean, interval = clustered_mean(np.array(sums), np.array(sizes))
    return {"loss": mean, "interval": interval}


def _describe(samples: Sequence[QuestionTokens]) -> dict[str, Any]:
    lengths = [_num_tokens(sample) for sample in samples]
    return {
        "samples": len(samples),
        "answer_tokens": sum(len(sample.answer) for sample in samples),
        "tokens": {"min": min(lengths), "mean": float(np.mean(lengths)), "max": max(lengths)},
        "ids": [sample.id for sample in samples],
    }


def _arrays(
    samples: Mapping[str, Sequence[QuestionTokens]],
    passes: Mapping[str, Mapping[str, Sequence[np.ndarray]]],
) -> dict[str, np.ndarray]:
    answers = [
        (task, number, len(sample.answer))
        for task, chosen in enumerate(samples.values())
        for number, sample in enumerate(chosen)
    ]
    return {
        "task": np.concatenate([np.full(n, task, np.int8) for task, _, n in answers]),
        "sample": np.concatenate([np.full(n, number, np.int32) for _, number, n in answers]),
        "position": np.concatenate([np.arange(n, dtype=np.int32) for *_, n in answers]),
        **{
            f"loss_{name}": np.concatenate([loss for losses in one.values() for loss in losses])
            for name, one in passes.items()
        },
    }


def _unsuited(config: ModelConfig) -> str | None:
    """Why the model cannot be evaluated; None if it can."""
    own = own_memory(config)
    if own is None:
        return None
    return (
        f"{own.name} has no memory that is written once a text and carried on; choose another model"
    )


def _missing(subject: Subject, config: LongBenchConfig) -> str | None:
    own = own_memory(subject.model.config)
    if own is not None:
        return f"a memory that is written once a text ({own.name}'s is not)"
    return None if config.data else "LongBench (--longbench.data PATH)"


def _run(subject: Subject, config: LongBenchConfig) -> Result:
    if config.data is None:
        raise ValueError("data=None: name LongBench, as in --longbench.data data.zip.")
    path = Path(config.data).expanduser()
    if path.suffix == ".jsonl" and len(config.tasks) > 1:
        raise ValueError(
            f"{path} is one task's file, but tasks={config.tasks}; give its folder or one task."
        )
    tokenizer = load_tokenizer(subject.text.tokenizer)
    samples = {task: tokenize_task(config, task, tokenizer) for task in config.tasks}
    return longbench_perplexity(
        subject.model,
        subject.memory,
        config=config,
        samples=samples,
        seed=subject.seed,
        origin=subject.origin_of(
            ({str(file): sha256(file)} for file in _files(path, config.tasks)), tokenizer
        ),
        partition=subject.partition,
    )


def _files(path: Path, tasks: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for task in tasks for file in sorted(path.rglob(f"{task}.jsonl"))]


LONGBENCH = Evaluation(
    config=LongBenchConfig,
    data="text",
    limit="max_samples",
    in_default_suite=False,  # Needs LongBench.
    run=_run,
    table=longbench_table,
    plot=plot_longbench,
    title="Answers about long texts",
    about=(
        "The model reads a long text, a question about it and the right answer, and is scored on "
        "the answer's tokens only; the memory is written once, after the text. Lower perplexity "
        "with writing enabled means that the memory of the text helped to predict the answer."
    ),
    finding=longbench_finding,
    missing=_missing,
)
