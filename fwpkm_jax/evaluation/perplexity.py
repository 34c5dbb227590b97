"""Streaming perplexity: documents read in order while the memory writes, or stays frozen.

References: Zhao and Jones 2026, arXiv:2601.00671, sections 4.2, D.2, D.3; Figures 2, 9, 14, 15.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.evaluation.addressing import AddressingWindows
from fwpkm_jax.evaluation.display import findings, plots, tables
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.segment_reader import SegmentReader, SegmentReading
from fwpkm_jax.evaluation.readers.segments import Segmentation
from fwpkm_jax.evaluation.readers.token_losses import TokenLosses, curves, differences, scores
from fwpkm_jax.evaluation.record import Origin, Result, describe_resets, first_group, make_result
from fwpkm_jax.evaluation.sources import Source, capped, missing_text, num_labels, text_sources
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import check_literals, some
from fwpkm_jax.models.language_model import LanguageModel, Memory


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig:
    """Streaming perplexity."""

    data: tuple[str, ...] = ()
    """Files or folders of text, one data set each, read in this order without resetting the memory
    between them. Empty: the run's validation text."""
    write: Literal["both", "on", "off"] = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    segment_length: int | None = None
    """Inputs of a full segment; attention and GDN start empty in each. None: the run's training
    length."""
    segmentation: Segmentation = "overlap"
    """overlap: every token but a document's first is scored. reference: as in the authors' release,
    whose segments drift apart: it skips k tokens after segment k."""
    chunk_size: int | None = None
    """Tokens per write. None: the model's."""
    queue: Literal["document", "segment"] = "document"
    """Tokens that wait to be written are kept until the end of the document, or dropped at the end
    of each segment as in the release."""
    memory_reset: Literal["never", "document"] = "never"
    """never: fast weights are carried from document to document. document: every document starts
    from the checkpoint's fast weights."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Precision of the memory between segments; bfloat16 rounds it after each segment, as the
    release does."""
    max_tokens: int | None = None
    """Tokens scored in each data set at most."""
    max_documents: int | None = None
    """Documents read of each data set at most."""
    window_segments: int = 8
    """Segments per window of the addressing statistics."""
    curve_documents: int = 10
    """Number of documents, from the first, for which the loss along the document is reported."""
    curve_tokens: int = 128
    """Tokens averaged in each point of such a curve."""

    def __post_init__(self) -> None:
        check_literals(self)
        for name in ("segment_length", "chunk_size", "max_tokens", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None.")
        for name, least in {"window_segments": 1, "curve_documents": 0, "curve_tokens": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


def streaming_perplexity(
    model: LanguageModel,
    memory: Memory,
    *,
    config: PerplexityConfig,
    sources: Sequence[Source],
    segment_length: int | None = None,
    seed: int = 0,
    origin: Origin | None = None,
    partition: Partition | None = None,
) -> Result:
    """Token-weighted perplexity of texts read as one stream, and the effect of writing on it.

    Documents are read in order with batch size 1. Every pass starts from the first memory group.
    There are no random draws; the seed is only recorded.

    Args:
      model: the language model.
      memory: fast weights to start from, leaves `[groups, ...]`; the first group is used.
      config: the protocol.
      sources: data sets in reading order.
      segment_length: inputs of a segment, used if `config.segment_length` is None.
      seed: the run's seed, for the record.
      origin: provenance of weights and texts, for the record.
      partition: devices that each read a part of every piece of text (`mesh.sequence`); None: one.

    Returns:
      `results` holds `writing` and `frozen` (loss in nats and perplexity by data set and over
      `all`, gate mean and addressing statistics by layer), `difference` (loss of writing minus
      frozen on the same tokens, with a 95 % interval over segments) and `curves`. Arrays hold
      each token's source, document, segment, position and losses.

    Raises:
      ValueError: no segment length is given, or the texts hold nothing to predict.
    """
    length = config.segment_length or segment_length
    if length is None:
        raise ValueError("segment_length=None: give the config or the call a segment length.")
    start = first_group(memory)
    writes = {"both": (True, False), "on": (True,), "off": (False,)}[config.write]
    passes: dict[str, TokenLosses] = {}
    summaries: dict[str, dict[str, Any]] = {}
    names = [source.name for source in sources]
    labels = num_labels(sources, max_documents=config.max_documents, max_tokens=config.max_tokens)
    forecast = Forecast("ppl", total=labels * len(writes), unit="tokens")
    for write in writes:
        reader = SegmentReader(
            model,
            start,
            write=write,
            segment_length=length,
            segmentation=config.segmentation,
            chunk_size=config.chunk_size,
            queue=config.queue,
            memory_reset=config.memory_reset,
            fast_weight_dtype=config.fast_weight_dtype,
            partition=partition,
        )
        num_slots = model.config.fast_weight.rule.num_slots or 0  # 0: no reads, no windows.
        name = "writing" if write else "frozen"
        passes[name], summaries[name] = _read_all(reader, sources, config, num_slots, forecast)
    first = next(iter(passes.values()))
    results: dict[str, Any] = {
        name: scores(one, names) | summaries[name] for name, one in passes.items()
    }
    if len(passes) == 2:
        results["difference"] = differences(passes["writing"], passes["frozen"], names)
    results["curves"] = curves(passes, documents=config.curve_documents, tokens=config.curve_tokens)
    return make_result(
        "ppl",
        model=model,
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=len(first.loss),
        mode=f"segmentation={config.segmentation}, segment_length={length}",
        chunk_size=config.chunk_size,
        fast_weight_dtype=config.fast_weight_dtype,
        resets=describe_resets(
            memory, fast_weights=config.memory_reset, queue=config.queue, caches="segment"
        ),
        results=results,
        arrays={
            **{f: getattr(first, f) for f in ("source", "document", "segment", "position")},
            **{f"loss_{name}": one.loss for name, one in passes.items()},
        },
    )


def _read_all(
    reader: SegmentReader,
    sources: Sequence[Source],
    config: PerplexityConfig,
    num_slots: int,
    forecast: Forecast,
) -> tuple[TokenLosses, dict[str, Any]]:
    """One pass over all data sets: every token's loss; gates, slot use and seconds."""
    began = time.monotonic()
    windows = AddressingWindows(num_slots, segments=config.window_segments)
    gate_sums: dict[str, float] = {}
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("source", "document", "segment", "position", "loss")
    }
    document_ids: list[str] = []
    tokens = 0
    for number, source in enumerate(sources):
        documents = capped(
            source.documents(), max_documents=config.max_documents, max_tokens=config.max_tokens
        )
        for document in documents:
            for index, reading in enumerate(_one_behind(reader.read(document.tokens))):
                losses, gates, slot_ids = reading.fetch()
                require_finite(losses, where=f"{source.name}, {document.id}")
                if slot_ids:
                    windows.add(slot_ids)
                for layer, gate in gates.items():
                    gate_sums[layer] = gate_sums.get(layer, 0.0) + float(gate.sum(dtype=np.float64))
                columns["source"].append(np.full(len(losses), number, np.int8))
                columns["document"].append(np.full(len(losses), len(document_ids), np.int32))
                columns["segment"].append(np.full(len(losses), index, np.int32))
                columns["position"].append(np.arange(len(losses), dtype=np.int32))
                columns["loss"].append(losses)
                tokens += len(losses)
                forecast.add(len(losses))
            document_ids.append(document.id)
    if not tokens:
        names = some([source.name for source in sources])
        raise ValueError(f"{names}: no document has the two tokens that a prediction needs.")
    summary = {
        "gate_mean": {layer: total / tokens for layer, total in gate_sums.items()},
        "addressing": windows.means(),
        "seconds": time.monotonic() - began,
    }
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    return TokenLosses(**arrays, document_ids=document_ids), summary


def _one_behind(readings: Iterator[SegmentReading]) -> Iterator[SegmentReading]:
    """The same readings, each delayed until the next is dispatched.

    The caller's fetch of one reading then overlaps with the computation of the next.
    """
    previous = None
    for reading in readings:
        if previous is not None:
            yield previous
        previous = reading
    if previous is not None:
        yield previous


def _run(subject: Subject, config: PerplexityConfig) -> Result:
    sources = text_sources(subject.text, config.data)
    return streaming_perplexity(
        subject.model,
        subject.memory,
        config=config,
        sources=sources,
        segment_length=subject.text.length,
        seed=subject.seed,
        origin=subject.origin_of(
            (source.files for source in sources), load_tokenizer(subject.text.tokenizer)
        ),
        partition=subject.partition,
    )


def _missing(subject: Subject, config: PerplexityConfig) -> str | None:
    return missing_text(subject.text, config.data)


PERPLEXITY = Evaluation(
    config=PerplexityConfig,
    data="text",
    limit="max_documents",
    run=_run,
    table=tables.perplexity_table,
    plot=plots.plot_perplexity,
    title="Perplexity while reading on",
    about=(
        "The model reads whole documents, piece by piece, and is scored on every next token. The "
        "same text is read twice, once with the memory writing what it reads and once with it "
        "frozen; where writing gives the lower loss, the memory learned from the text itself."
    ),
    finding=findings.perplexity_finding,
    missing=_missing,
)
