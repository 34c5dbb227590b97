"""Gate maps: a text with every memory layer's gate at each token.

References: Zhao and Jones 2026, arXiv:2601.00671, section 5.2; Figures 8 and 16.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from fwpkm_jax.data import Tokenizer, load_tokenizer
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.readers.stream_reader import StreamReader
from fwpkm_jax.evaluation.record import describe_resets
from fwpkm_jax.evaluation.sources import files_of, missing_text, text_sources
from fwpkm_jax.literals import Checked, Count, Natural, some
from fwpkm_jax.paper.evaluation import gate_map_views as views
from fwpkm_jax.paper.evaluation.token_texts import token_texts


@dataclass(frozen=True, kw_only=True)
class GateMapConfig(Checked):
    """Gates along a text."""

    document: Natural = 0
    """Index of the document to read, counted from 0 over all texts."""
    tokens: Count = 1000
    """Tokens read, from the document's start."""
    chunk_size: Count = 32
    """Tokens per write; the paper's heat maps write more often than its other evaluations."""
    write: bool = True
    """Write while reading. Off: the memory stays as the checkpoint has it."""


def evaluate(
    subject: Subject,
    config: GateMapConfig,
    *,
    document_id: str | None = None,
    tokens: np.ndarray | None = None,
    tokenizer: Tokenizer | None = None,
) -> Outcome:
    """Each token's gates while the text is read from its start.

    Args:
      document_id: the text's name in results.
      tokens: int32 `[length]`, the text; at most `config.tokens` are read, the next one is a label
        only. None: the one of the run's texts that the options name.
      tokenizer: the model's tokenizer; None: the run's.

    Returns:
      Numbers are lists with one entry per token: `texts`, `losses` in nats and, by layer, `gates`.
      `gate_mixes` says whether the gates change the model's output.

    Raises:
      ValueError: the model has no memory layer, or the text has fewer than two tokens.
    """
    model = subject.model
    if not model.config.memory_layers:
        raise ValueError("The model has no memory layer (memory_layers=()), so it has no gates.")
    files: dict[str, str] = {}
    if tokens is None:
        sources = text_sources(subject.text)
        files = files_of(source.files for source in sources)
        documents = itertools.chain.from_iterable(
            source.documents(most_tokens=config.tokens + 1) for source in sources
        )
        document = next(itertools.islice(documents, config.document, None), None)
        if document is None:
            names = some([source.name for source in sources])
            raise ValueError(f"document={config.document} is beyond the last document of {names}.")
        document_id, tokens = document.id, document.tokens
    if tokenizer is None:
        tokenizer = load_tokenizer(subject.text.tokenizer)
    tokens = tokens[: config.tokens + 1]
    if len(tokens) < 2:
        raise ValueError(f"{document_id} has {len(tokens)} tokens; name a longer document.")
    reader = StreamReader(
        model,
        subject.first_memory,
        write=config.write,
        piece_length=len(tokens) - 1,
        chunk_size=config.chunk_size,
        fast_weight_dtype=subject.fast_weight_dtype,
        partition=subject.partition,
    )
    losses, gates, _ = reader.read(tokens[:-1], tokens[1:]).fetch()
    return Outcome(
        numbers={
            "document": document_id,
            "gate_mixes": model.config.fast_weight.gate_in_output,
            "texts": token_texts(tokenizer, tokens[:-1]),
            "losses": [round(float(loss), 4) for loss in losses],
            "gates": {
                layer: [round(float(value), 4) for value in gate] for layer, gate in gates.items()
            },
        },
        scored_tokens=len(losses),
        files=files,
        mode="stream" if config.write else "frozen",
        resets=describe_resets(subject.memory, fast_weights="never", queue="never", caches="never"),
        chunk_size=config.chunk_size,
    )


def _missing(subject: Subject, config: GateMapConfig) -> str | None:
    if not subject.model.config.memory_layers:
        return "a memory layer"
    return missing_text(subject.text)


GATE_MAP = Evaluation(
    name="gate_map",
    config=GateMapConfig,
    evaluate=evaluate,
    limit="tokens",
    title="Where the model uses its memory",
    about=(
        "A text with each token shaded by its gate: the share that a memory layer takes from its "
        "memory, rather than from the token itself. Dark tokens lean on what was read before. A "
        "model that does not use its gate has no shades."
    ),
    table=views.table,
    plot=views.plot,
    missing=_missing,
)
