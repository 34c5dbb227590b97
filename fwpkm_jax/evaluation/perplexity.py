"""Streaming perplexity: documents read in order while the memory writes, or stays frozen.

References: Zhao and Jones 2026, arXiv:2601.00671, sections 4.2, D.2, D.3; Figures 2, 9, 14, 15.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fwpkm_jax.data import Document
from fwpkm_jax.evaluation import perplexity_views as views
from fwpkm_jax.evaluation.addressing import AddressingWindows
from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Passes, Subject, passes_of
from fwpkm_jax.evaluation.readers.document_reader import read_document
from fwpkm_jax.evaluation.readers.finite import require_finite
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.readers.token_losses import (
    TokenLosses,
    collect,
    curves,
    differences,
    scores,
)
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import (
    Source,
    capped,
    files_of,
    missing_text,
    num_labels,
    text_sources,
)
from fwpkm_jax.literals import Checked, Count, some

_WINDOW = 8
"""Segments per window of the addressing statistics."""
_CURVES = 10
"""Documents, from the first, for which the loss along the document is reported."""
_POINT = 128
"""Tokens averaged in each point of such a curve."""


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(Checked):
    """Streaming perplexity."""

    write: Passes = "both"
    """Write the memory while reading, keep it frozen, or do one after the other and compare."""
    segment_length: Count | None = None
    """Inputs of a full segment; attention and GDN start empty in each. None: the run's training
    length."""
    protocol: Literal["default", "release"] = "default"
    """default: every token but a document's first is scored, and tokens that wait to be written are
    kept until the end of the document. release: as in the authors' release, whose segments drift
    apart (it skips k tokens after segment k), and what waits is dropped at the end of each."""
    chunk_size: Count | None = None
    """Tokens per write. None: the model's."""
    memory_reset: Literal["never", "document"] = "never"
    """never: fast weights are carried from document to document. document: every document starts
    from the checkpoint's fast weights."""
    max_tokens: Count | None = None
    """Tokens scored in each data set at most."""
    max_documents: Count | None = None
    """Documents read of each data set at most."""


def evaluate(
    subject: Subject, config: PerplexityConfig, *, sources: Sequence[Source] | None = None
) -> Outcome:
    """Token-weighted perplexity of texts read as one stream, and the effect of writing on it.

    Documents are read in order with batch size 1. Every pass starts from the first memory group.
    There are no random draws.

    Args:
      sources: data sets in reading order; None: those that options and run name.

    Returns:
      Numbers are `writing` and `frozen` (loss in nats and perplexity by data set and over `all`,
      gate mean and addressing statistics by layer), `difference` (loss of writing minus frozen on
      the same tokens, with a 95 % interval over segments) and `curves`. Arrays hold each token's
      source, document, segment, position and losses.

    Raises:
      ValueError: no segment length is known, or the texts hold nothing to predict.
    """
    length = config.segment_length or subject.text.length
    sources = text_sources(subject.text) if sources is None else sources
    writes = passes_of(config.write)
    names = [source.name for source in sources]
    labels = num_labels(sources, max_documents=config.max_documents, max_tokens=config.max_tokens)
    forecast = Forecast("ppl", total=labels * len(writes), unit="tokens")
    passes: dict[str, TokenLosses] = {}
    summaries: dict[str, dict[str, Any]] = {}
    for name, write in writes:
        passes[name], summaries[name] = _read_all(
            subject, config, sources, length, forecast, write=write
        )
    results: dict[str, Any] = {
        name: scores(one, names) | summaries[name] for name, one in passes.items()
    }
    if len(passes) == 2:
        results["difference"] = differences(passes["writing"], passes["frozen"], names)
    results["curves"] = curves(passes, documents=_CURVES, tokens=_POINT)
    first = next(iter(passes.values()))
    return Outcome(
        numbers=results,
        scored_tokens=len(first.loss),
        arrays=first.places() | {f"loss_{name}": one.loss for name, one in passes.items()},
        files=files_of(source.files for source in sources),
        mode=f"protocol={config.protocol}, segment_length={length}",
        resets=describe_resets(
            subject.memory,
            fast_weights=config.memory_reset,
            queue="segment" if config.protocol == "release" else "document",
            caches="segment",
        ),
        chunk_size=config.chunk_size,
    )


def _read_all(
    subject: Subject,
    config: PerplexityConfig,
    sources: Sequence[Source],
    length: int,
    forecast: Forecast,
    *,
    write: bool,
) -> tuple[TokenLosses, dict[str, Any]]:
    """One pass over all data sets: every token's loss; gates, slot use and seconds."""
    began = time.monotonic()
    reader = StreamReader(
        subject.model,
        subject.first_memory,
        write=write,
        piece_length=length,
        chunk_size=config.chunk_size,
        fast_weight_dtype=subject.fast_weight_dtype,
        partition=subject.partition,
    )
    num_slots = subject.model.config.fast_weight.rule.num_slots or 0  # 0: no reads, no windows.
    windows = AddressingWindows(num_slots, segments=_WINDOW)
    gate_sums: dict[str, float] = {}

    def segments(document: Document, where: str) -> Iterator[np.ndarray]:
        readings = read_document(
            reader,
            document.tokens,
            segment_length=length,
            protocol=config.protocol,
            memory_reset=config.memory_reset,
        )
        # Each is fetched while the next is computed.
        for reading, _ in itertools.pairwise(itertools.chain(readings, [None])):
            assert reading is not None
            losses, gates, slot_ids = reading.fetch()
            if slot_ids:
                windows.add(slot_ids)
            for layer, gate in gates.items():
                gate_sums[layer] = gate_sums.get(layer, 0.0) + float(gate.sum(dtype=np.float64))
            yield require_finite(losses, where=where)

    limits = {"max_documents": config.max_documents, "max_tokens": config.max_tokens}
    losses = collect(
        (
            (number, document.id, segments(document, f"{source.name}, {document.id}"))
            for number, source in enumerate(sources)
            for document in capped(source, **limits)
        ),
        forecast,
        what=some([source.name for source in sources]),
    )
    return losses, {
        "gate_mean": {layer: total / len(losses.loss) for layer, total in gate_sums.items()},
        "addressing": windows.means(),
        "seconds": time.monotonic() - began,
    }


PERPLEXITY = Evaluation(
    name="ppl",
    config=PerplexityConfig,
    evaluate=evaluate,
    limit="max_documents",
    title="Perplexity while reading on",
    about=(
        "The model reads whole documents, piece by piece, and is scored on every next token. The "
        "same text is read twice, once with the memory writing what it reads and once with it "
        "frozen; where writing gives the lower loss, the memory learned from the text itself."
    ),
    table=views.table,
    plot=views.plot,
    finding=views.finding,
    missing=lambda subject, config: missing_text(subject.text),
)
