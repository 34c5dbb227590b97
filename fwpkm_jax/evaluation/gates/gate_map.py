"""Gate maps: a text with every memory layer's gate at each token.

References: Zhao and Jones 2026, arXiv:2601.00671, section 5.2; Figures 8 and 16.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.display.token_texts import token_texts
from fwpkm_jax.evaluation.gates.gate_map_views import gate_map_page, gate_map_table
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.readers.segment_reader import SegmentReader
from fwpkm_jax.evaluation.record import Origin, Result, describe_resets, first_group, make_result
from fwpkm_jax.evaluation.sources import missing_text, text_sources
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import some
from fwpkm_jax.models.language_model import LanguageModel, Memory


@dataclass(frozen=True, kw_only=True)
class GateMapConfig:
    """Gates along a text."""

    data: tuple[str, ...] = ()
    """Files or folders of text. Empty: the run's validation text."""
    document: int = 0
    """Index of the document to read, counted from 0 over all texts."""
    tokens: int = 1000
    """Tokens read, from the document's start."""
    chunk_size: int = 32
    """Tokens per write; the paper's heat maps write more often than its other evaluations."""
    write: bool = True
    """Write while reading. Off: the memory stays as the checkpoint has it."""

    def __post_init__(self) -> None:
        for name, least in {"document": 0, "tokens": 1, "chunk_size": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")


def gate_map(
    model: LanguageModel,
    memory: Memory,
    *,
    config: GateMapConfig,
    document_id: str,
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    seed: int = 0,
    origin: Origin | None = None,
    partition: Partition | None = None,
) -> Result:
    """Each token's gates while the text is read from its start.

    Args:
      model: the language model.
      memory: fast weights to start from, leaves `[groups, ...]`; the first group is used.
      config: the protocol.
      document_id: the text's name in results.
      tokens: int32 `[length]`; at most `config.tokens` are read, the next one is a label only.
      tokenizer: the model's tokenizer.
      seed: the run's seed, for the record; there are no random draws.
      origin: provenance of weights and text, for the record.
      partition: devices that each read a part of the text (`mesh.sequence`); None: one.

    Returns:
      `results` holds lists with one entry per token: `texts`, `losses` in nats and, by layer,
      `gates`. `gate_mixes` says whether the gates change the model's output.

    Raises:
      ValueError: the model has no memory layer, or the text has fewer than two tokens.
    """
    if not model.config.memory_layers:
        raise ValueError("The model has no memory layer (memory_layers=()), so it has no gates.")
    tokens = tokens[: config.tokens + 1]
    if len(tokens) < 2:
        raise ValueError(f"{document_id} has {len(tokens)} tokens; name a longer document.")
    start = first_group(memory)
    reader = SegmentReader(
        model,
        start,
        write=config.write,
        segment_length=len(tokens) - 1,
        chunk_size=config.chunk_size,
        partition=partition,
    )
    (reading,) = reader.read(tokens)
    losses, gates, _ = reading.fetch()
    return make_result(
        "gate_map",
        model=model,
        memory=memory,
        config=config,
        origin=origin or Origin(),
        seed=seed,
        scored_tokens=len(losses),
        mode="stream" if config.write else "frozen",
        chunk_size=config.chunk_size,
        resets=describe_resets(memory, fast_weights="never", queue="never", caches="never"),
        results={
            "document": document_id,
            "gate_mixes": model.config.fast_weight.gate_in_output,
            "texts": token_texts(tokenizer, tokens[:-1]),
            "losses": [round(float(loss), 4) for loss in losses],
            "gates": {
                layer: [round(float(value), 4) for value in gate] for layer, gate in gates.items()
            },
        },
    )


def _run(subject: Subject, config: GateMapConfig) -> Result:
    sources = text_sources(subject.text, config.data)
    documents = itertools.chain.from_iterable(source.documents() for source in sources)
    document = next(itertools.islice(documents, config.document, None), None)
    if document is None:
        names = some([source.name for source in sources])
        raise ValueError(f"document={config.document} is beyond the last document of {names}.")
    tokenizer = load_tokenizer(subject.text.tokenizer)
    return gate_map(
        subject.model,
        subject.memory,
        config=config,
        document_id=document.id,
        tokens=document.tokens,
        tokenizer=tokenizer,
        seed=subject.seed,
        origin=subject.origin_of((source.files for source in sources), tokenizer),
        partition=subject.partition,
    )


def _missing(subject: Subject, config: GateMapConfig) -> str | None:
    if not subject.model.config.memory_layers:
        return "a memory layer"
    return missing_text(subject.text, config.data)


GATE_MAP = Evaluation(
    config=GateMapConfig,
    data="text",
    limit="tokens",
    in_default_suite=False,
    run=_run,
    table=gate_map_table,
    plot=gate_map_page,
    title="Where the model uses its memory",
    about=(
        "A text with each token shaded by its gate: the share that a memory layer takes from its "
        "memory, rather than from the token itself. Dark tokens lean on what was read before. A "
        "model that does not use its gate has no shades."
    ),
    missing=_missing,
)
