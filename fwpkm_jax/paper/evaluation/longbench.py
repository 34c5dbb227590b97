"""LongBench: perplexity of the answers to questions about long texts that the memory has read.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.4, Figure 5.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.data.longbench import MAX_TOKENS, TASKS, read_samples, task_files
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Passes, Subject, passes_of
from fwpkm_jax.evaluation.intervals import clustered_mean
from fwpkm_jax.evaluation.readers.fast_weight_dtype import as_stored
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.reconfigure import with_yarn
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import sha256
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import Count, check_fields
from fwpkm_jax.models.config import mixer_memory
from fwpkm_jax.models.language_model import LanguageModel, Memory
from fwpkm_jax.paper.evaluation import longbench_views as views

_LEAST_ROOM = 1024  # Smallest capacity of a reader in tokens; larger ones are 4 times as large.


@dataclass(frozen=True, kw_only=True)
class LongBenchConfig:
    """LongBench answer perplexity."""

    data: str | None = None
    """LongBench's data.zip, or a folder of TASK.jsonl files."""
    tasks: tuple[str, ...] = TASKS
    """Tasks; each starts from the checkpoint's memory."""
    write: Passes = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    memory_reset: Literal["task", "sample"] = "task"
    """When fast weights are reset to the checkpoint's: before each task, or before each sample."""
    max_samples: Count | None = None
    """Samples scored of each task at most."""
    max_tokens: Count = MAX_TOKENS
    """Longest sample; counts context, question and the longest answer. Longer ones are left out."""
    yarn_factor: float | None = 20.0
    """YaRN's factor for rotary positions, in every sample. None: positions as trained."""
    yarn_original_length: int = 1024
    """YaRN's original context length; the release uses 1024 although it trained on 4096."""
    piece_length: Count = 512
    """Tokens read per call; limits the device memory needed and does not change results."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.tasks or set(self.tasks) - set(TASKS) or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks={self.tasks} must be distinct names among {', '.join(TASKS)}.")


class QuestionTokens(NamedTuple):
    """A sample as token ids; each part is tokenised separately."""

    id: str
    context: np.ndarray
    question: np.ndarray
    answer: np.ndarray


def evaluate(
    subject: Subject,
    config: LongBenchConfig,
    *,
    samples: Mapping[str, Sequence[QuestionTokens]] | None = None,
) -> Outcome:
    """Perplexity of all answer tokens of each task, and the effect of writing on it.

    A sample is read in one pass from empty caches. The memory is written as soon as the context and
    `lookahead` tokens after it were read: the pairs of the context are complete then,
    and all later tokens read the written memory. FwMLP keeps its chunk size, because one step on a
    whole text makes its weights NaN.

    Args:
      subject: the model and its memory, from whose first group every task starts.
      config: the protocol.
      samples: samples by task, in reading order; None: those of `config.data` within the limits.

    Returns:
      Numbers are `tasks` (samples, their lengths, answer tokens) and, by task, loss in nats and
      perplexity under `writing` and `frozen`, and under `difference` the loss of writing minus
      frozen with a 95 % interval over samples. Arrays hold each answer token's task, sample,
      position and losses.

    Raises:
      ValueError: a mixer's memory is reset for each sequence, or a task has no sample.
    """
    own = mixer_memory(subject.model.config)
    if own is not None:
        raise ValueError(
            f"LongBench: {own.name} has no memory that is written once a text and carried on; "
            "choose another model."
        )
    files: dict[str, str] = {}
    if samples is None:
        samples, files = _read_samples(config, load_tokenizer(subject.text.tokenizer))
    for task, chosen in samples.items():
        if not chosen:
            raise ValueError(f"LongBench: no sample of {task} is left; raise max_tokens.")
    model = with_yarn(
        subject.model, factor=config.yarn_factor, original_length=config.yarn_original_length
    )
    began = time.monotonic()
    writes = passes_of(config.write)
    tokens = sum(_num_tokens(sample) for chosen in samples.values() for sample in chosen)
    forecast = Forecast("longbench", total=tokens * len(writes), unit="tokens")
    passes: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, write in writes:
        read = partial(_read_task, model, subject, config=config, forecast=forecast, write=write)
        passes[name] = {task: read(chosen) for task, chosen in samples.items()}
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
    return Outcome(
        numbers=results,
        scored_tokens=sum(one["answer_tokens"] for one in results["tasks"].values()),
        arrays=_arrays(samples, passes),
        files=files,
        mode="one pass over context, question and answer",
        resets=describe_resets(
            subject.memory, fast_weights=config.memory_reset, queue="sample", caches="sample"
        ),
        chunk_size=None if keeps_chunks else "the context block of each sample",
        model=model,
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
      memory: fast weights, leaves `[1, ...]`; their buffers are not reused.
      write: False disables writing.
      partition: devices that share the reading; None: one.
    """
    tokens = np.concatenate([sample.context, sample.question, sample.answer])
    inputs, labels = tokens[:-1], tokens[1:]
    room = _LEAST_ROOM
    while room < len(inputs):
        room *= 4  # Few sizes, because each size is compiled separately.
    rule = model.config.fast_weight.rule
    keeps_chunks = not rule.long_writes
    reader = StreamReader(
        model,
        memory,
        capacity=room,
        max_length=room,
        piece_length=piece_length,
        write=write,
        chunk_size=None if keeps_chunks else "flush",
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
            reading = reader.read(inputs[part], labels[part])
            losses.append(require_finite(reading.losses(), where="The answer"))
        if end in due:
            reader.write()
        at = end
    return np.concatenate(losses), reader.stream.memory


def _read_task(
    model: LanguageModel,
    subject: Subject,
    samples: Sequence[QuestionTokens],
    *,
    config: LongBenchConfig,
    forecast: Forecast,
    write: bool,
) -> list[np.ndarray]:
    """Each sample's losses in nats, `[answer tokens]`."""
    memory = start = as_stored(subject.first_memory, subject.fast_weight_dtype)
    losses = []
    for sample in samples:
        loss, memory = read_sample(
            model,
            memory,
            sample,
            piece_length=config.piece_length,
            write=write,
            partition=subject.partition,
        )
        memory = as_stored(memory, subject.fast_weight_dtype)
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


def _read_samples(
    config: LongBenchConfig, tokenizer: Tokenizer
) -> tuple[dict[str, list[QuestionTokens]], dict[str, str]]:
    """The samples of all tasks, and SHA-256 of their files by path."""
    if config.data is None:
        raise ValueError("data=None: name LongBench, as in --longbench.data data.zip.")
    path = Path(config.data).expanduser()
    files = task_files(path, config.tasks)
    samples = {task: tokenize_task(config, task, tokenizer) for task in config.tasks}
    return samples, {str(file): sha256(file) for file in files}


def _missing(subject: Subject, config: LongBenchConfig) -> str | None:
    own = mixer_memory(subject.model.config)
    if own is not None:
        return f"a memory that is written once a text ({own.name}'s is not)"
    return None if config.data else "LongBench (--longbench.data PATH)"


LONGBENCH = Evaluation(
    name="longbench",
    config=LongBenchConfig,
    evaluate=evaluate,
    limit="max_samples",
    title="Answers about long texts",
    about=(
        "The model reads a long text, a question about it and the right answer, and is scored on "
        "the answer's tokens only; the memory is written once, after the text. Lower perplexity "
        "with writing enabled means that the memory of the text helped to predict the answer."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    missing=_missing,
)
