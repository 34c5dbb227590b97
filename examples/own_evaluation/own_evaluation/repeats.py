"""The loss on phrases that a document repeats, and on new ones: a memory should help the former."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fwpkm_jax.evaluation import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.display.tables import Record, format_table
from fwpkm_jax.evaluation.readers.document_reader import read_document
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.sources import capped, files_of, missing_text, text_sources
from fwpkm_jax.literals import Checked, Count, Natural

PASSES = ("writing", "frozen")


@dataclass(frozen=True, kw_only=True)
class RepeatsConfig(Checked):
    """Loss on repeated and on new phrases."""

    context: Natural = 3
    """Tokens before a token that make a phrase with it."""
    max_documents: Count | None = None
    """Documents read of each data set at most."""


def repeated(tokens: np.ndarray, context: int) -> np.ndarray:
    """Whether each token but the first, with `context` tokens before it, stood there before.

    Takes `[length]` ids of a document and gives `[length - 1]` booleans.
    """
    seen: set[tuple[int, ...]] = set()
    found = []
    for end in range(len(tokens)):
        phrase = tuple(tokens[max(0, end - context) : end + 1].tolist())
        found.append(phrase in seen)
        seen.add(phrase)
    return np.array(found[1:], bool)


def evaluate(subject: Subject, options: RepeatsConfig) -> Outcome:
    """Mean loss in nats of repeated and of new phrases, with the memory writing and frozen.

    Numbers are `tokens`, `writing` and `frozen`, each with `repeated` and `new`; a loss is None if
    there is no such token. Arrays hold every token's loss and whether its phrase is repeated.
    """
    sources, length = text_sources(subject.text), subject.text.length
    arrays: dict[str, np.ndarray] = {}
    for name in PASSES:
        reader = StreamReader(
            subject.model,
            subject.first_memory,
            write=name == "writing",
            piece_length=length,
            fast_weight_dtype=subject.fast_weight_dtype,
            partition=subject.partition,
        )
        losses, phrases = [], []
        for source in sources:
            for document in capped(source, max_documents=options.max_documents):
                phrases.append(repeated(document.tokens, options.context))
                readings = read_document(reader, document.tokens, segment_length=length)
                losses += [reading.losses() for reading in readings]
        arrays |= {f"loss_{name}": np.concatenate(losses), "repeated": np.concatenate(phrases)}
    chosen = {"repeated": arrays["repeated"], "new": ~arrays["repeated"]}
    numbers: dict[str, Any] = {"tokens": {kind: int(x.sum()) for kind, x in chosen.items()}}
    for name in PASSES:
        loss = arrays[f"loss_{name}"]
        numbers[name] = {k: float(loss[x].mean()) if x.any() else None for k, x in chosen.items()}
    return Outcome(
        numbers=numbers,
        scored_tokens=len(arrays["repeated"]),
        arrays=arrays,
        files=files_of(source.files for source in sources),
    )


def table(record: Record) -> str:
    """The losses as a table."""
    results, rows = record["results"], []
    for kind, tokens in results["tokens"].items():
        losses = [results[name][kind] for name in PASSES]
        rows.append([kind, f"{tokens:,}", *("-" if x is None else f"{x:.4f}" for x in losses)])
    return format_table(["phrases", "tokens", "loss, writing", "frozen memory"], rows)


REPEATS = Evaluation(
    name="repeats",
    config=RepeatsConfig,
    evaluate=evaluate,
    limit="max_documents",
    title="Phrases that a text repeats",
    about=(
        "Every token is scored while the model reads documents, once with the memory writing and "
        "once with it frozen. Tokens are counted apart by whether the few tokens that end with "
        "them stood in the document before; a memory of the text helps where they did."
    ),
    table=table,
    missing=lambda subject, options: missing_text(subject.text),
)
