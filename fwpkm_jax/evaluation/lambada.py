"""LAMBADA: the last word of a passage, which only the whole passage tells.

References: Paperno et al. 2016, arXiv:1606.06031.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.data.documents import read_documents
from fwpkm_jax.evaluation.data_files import local_path
from fwpkm_jax.evaluation.display.tables import PASSES, Record, format_table, share
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.intervals import wilson
from fwpkm_jax.evaluation.option_checks import check_least
from fwpkm_jax.evaluation.questions.asking import ReadingOptions, mean_score
from fwpkm_jax.evaluation.readers.batch_reader import Part, check_one_device, passes_of
from fwpkm_jax.evaluation.readers.prompts import encode_parts
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import sha256


@dataclass(frozen=True, kw_only=True)
class LambadaConfig(ReadingOptions):
    """LAMBADA's accuracy."""

    data: str | None = None
    """A .jsonl file of passages, here or on the hub
    (hf://datasets/EleutherAI/lambada_openai/data/lambada_test_en.jsonl)."""
    field: str = "text"
    """Field of a record that holds the passage."""
    max_passages: int | None = None
    """Passages at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "max_passages")


def evaluate(
    subject: Subject, config: LambadaConfig, *, tokenizer: Tokenizer | None = None
) -> Outcome:
    """Share of passages whose last word is the most likely one, and the word's perplexity.

    The word is right if each of its tokens is the most likely one after those before it. The
    perplexity is the exponential of the mean loss of a whole last word.

    Args:
      subject: the model and its memory, of which the first group is used.
      config: the protocol.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are `writing` and `frozen`, each with `accuracy`, its 95 % `interval`, `answers` and
      `perplexity`, the `difference` of their accuracies, and `passages`. Arrays hold each word's
      loss in nats and whether it is right.

    Raises:
      ValueError: no data are named, or a passage has fewer than two words.
    """
    check_one_device(subject.partition, "lambada")
    if config.data is None:
        raise ValueError("data=None: name the passages, as in --lambada.data lambada_test.jsonl.")
    tokenizer = load_tokenizer(subject.text.tokenizer) if tokenizer is None else tokenizer
    path = local_path(config.data)
    texts = [[part] for part in read_passages(path, config, tokenizer)]
    model = config.stretched(subject.model)
    began, numbers, arrays = time.monotonic(), {}, {}
    right: dict[str, np.ndarray] = {}
    passes = passes_of(config.write)
    forecast = Forecast("lambada", total=len(texts) * len(passes), unit="passages")
    for name, write in passes:
        reader = config.reader(model, subject.memory, write=write)
        scores = [one[0] for one in reader.log_likelihoods(texts, done=forecast.add)]
        losses = -np.array([score.nats for score in scores])
        right[name] = np.array([score.greedy for score in scores])
        correct = int(right[name].sum())
        numbers[name] = {
            "accuracy": correct / len(texts),
            "interval": wilson(correct, len(texts)),
            "answers": len(texts),
            "perplexity": float(np.exp(losses.mean())),
        }
        arrays |= {f"loss_{name}": losses.astype(np.float32), f"right_{name}": right[name]}
    if len(right) == 2:
        numbers["difference"] = mean_score(right["writing"] - right["frozen"].astype(np.float64))
    return Outcome(
        numbers=numbers | {"passages": len(texts), "seconds": time.monotonic() - began},
        scored_tokens=sum(len(part.continuation) for text in texts for part in text),
        arrays=arrays,
        files={config.data: sha256(path)},
        mode="greedy last word",
        resets=describe_resets(
            subject.memory,
            fast_weights="passage" if config.memory_reset == "text" else "never",
            queue="passage",
            caches="passage",
        ),
        chunk_size=config.chunk_size,
        model=model,
    )


def read_passages(path: Path, config: LambadaConfig, tokenizer: Tokenizer) -> list[Part]:
    """Passages as tokens: all but the last word, and the last word with the space before it."""
    parts = []
    for one in read_documents(path, field=config.field):
        if config.max_passages is not None and len(parts) == config.max_passages:
            break
        context, _, word = one.text.rstrip().rpartition(" ")
        if not context.strip() or not word:
            raise ValueError(f"{path}, {one.id}: the passage {one.text[:40]!r} has only one word.")
        parts.append(Part(*encode_parts(context, f" {word}", tokenizer)))
    if not parts:
        raise ValueError(f"{path} holds no passage.")
    return parts


def table(record: Record) -> str:
    """Accuracy and perplexity of the last word by pass."""
    results = record["results"]
    rows = [
        [label, f"{one['answers']:,}", share(one), f"{one['perplexity']:.4g}"]
        for label, one in ((x, results[name]) for name, x in PASSES.items() if name in results)
    ]
    return format_table(["LAMBADA", "passages", "accuracy", "perplexity"], rows)


def finding(record: Record) -> str:
    """The accuracy in both passes."""
    results: dict[str, Any] = record["results"]
    said = [f"{results[x]['accuracy']:.1%} with {PASSES[x]}" for x in PASSES if x in results]
    return f"Of {results['passages']:,} last words, right were {' and '.join(said)}."


def _missing(subject: Subject, config: LambadaConfig) -> str | None:
    if subject.partition is not None:
        return "a single device"
    return None if config.data else "LAMBADA (--lambada.data PATH)"


LAMBADA = Evaluation(
    name="lambada",
    config=LambadaConfig,
    evaluate=evaluate,
    limit="max_passages",
    title="LAMBADA",
    about=(
        "Each passage ends with a word that people guess from the whole passage but not from its "
        "last sentence. The word counts if the model finds each of its tokens most likely. The "
        "passages are read with the memory writing and with it frozen."
    ),
    table=table,
    finding=finding,
    controls="none",
    missing=_missing,
)
