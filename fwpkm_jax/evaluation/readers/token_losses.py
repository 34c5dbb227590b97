"""Losses of single tokens, and their summaries: perplexity, differences, curves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.evaluation.forecast import Forecast
from fwpkm_jax.evaluation.intervals import clustered_mean


class TokenLosses(NamedTuple):
    """Every scored token of one pass over some data sets, in reading order; arrays `[tokens]`."""

    source: np.ndarray
    """int8, index of the data set."""
    document: np.ndarray
    """int32, index of the document within the pass."""
    segment: np.ndarray
    """int32, index within the document."""
    position: np.ndarray
    """int32, position of the input within the segment."""
    loss: np.ndarray
    """float32, nats."""
    document_ids: list[str]
    """Ids of the documents, by index."""

    def places(self) -> dict[str, np.ndarray]:
        """The arrays that say where each token stands, by name."""
        return {name: getattr(self, name) for name in ("source", "document", "segment", "position")}


def collect(
    documents: Iterable[tuple[int, str, Iterable[np.ndarray]]],
    forecast: Forecast | None = None,
    *,
    what: str,
) -> TokenLosses:
    """The losses of a pass that reads documents one after the other.

    Args:
      documents: for each, the index of its data set, its id and its segments' losses, `[length]`.
      forecast: is told of the tokens that were read.
      what: what is read, for the message.

    Raises:
      ValueError: there is no loss.
    """
    columns, document_ids = [], []
    for source, name, segments in documents:
        for segment, losses in enumerate(segments):
            size = len(losses)
            columns.append(
                (
                    np.full(size, source, np.int8),
                    np.full(size, len(document_ids), np.int32),
                    np.full(size, segment, np.int32),
                    np.arange(size, dtype=np.int32),
                    losses,
                )
            )
            if forecast is not None:
                forecast.add(size)
        document_ids.append(name)
    if not columns:
        raise ValueError(f"{what}: no document has the two tokens that a prediction needs.")
    source, document, segment, position, loss = map(np.concatenate, zip(*columns, strict=True))
    return TokenLosses(source, document, segment, position, loss, document_ids)


def scores(losses: TokenLosses, sources: Sequence[str]) -> dict[str, Any]:
    """Numbers of tokens and documents, loss in nats, perplexity; by data set and over all."""

    def score(chosen: np.ndarray) -> dict[str, float]:
        loss = float(np.mean(losses.loss[chosen], dtype=np.float64))
        return {
            "tokens": int(chosen.sum()),
            "documents": len(np.unique(losses.document[chosen])),
            "loss": loss,
            "perplexity": float(np.exp(loss)),
        }

    return _by_source(losses, sources, score)


def differences(
    writing: TokenLosses, frozen: TokenLosses, sources: Sequence[str]
) -> dict[str, Any]:
    """Loss of `writing` minus loss of `frozen` on the same tokens, with an interval of 95 %.

    The interval treats segments as independent samples; more text narrows it. Segments of one
    document are similar, so the interval is somewhat too narrow if there are few documents.
    """
    difference = writing.loss.astype(np.float64) - frozen.loss
    new_document = np.diff(writing.document, prepend=-1) != 0
    new_segment = np.diff(writing.segment, prepend=-1) != 0
    cluster = np.cumsum(new_document | new_segment) - 1

    def score(chosen: np.ndarray) -> dict[str, Any]:
        _, ids = np.unique(cluster[chosen], return_inverse=True)
        sums, sizes = np.bincount(ids, difference[chosen]), np.bincount(ids)
        mean, interval = clustered_mean(sums, sizes)
        return {"loss": mean, "interval": interval, "segments": len(sizes)}

    return _by_source(writing, sources, score)


def curves(
    passes: Mapping[str, TokenLosses], *, documents: int, tokens: int
) -> list[dict[str, Any]]:
    """Loss curves along the first `documents` documents, by pass.

    Each point is the mean loss in nats of `tokens` consecutive tokens; a document's last point may
    average fewer.
    """
    first = next(iter(passes.values()))
    found = []
    for number, name in enumerate(first.document_ids[:documents]):
        chosen = first.document == number
        length = int(chosen.sum())
        if not length:
            continue
        starts = np.arange(0, length, tokens)
        sizes = np.diff(np.append(starts, length))
        means = {
            key: (np.add.reduceat(one.loss[chosen], starts, dtype=np.float64) / sizes).tolist()
            for key, one in passes.items()
        }
        found.append({"document": name, "tokens": length, "run": tokens, **means})
    return found


def _by_source(
    losses: TokenLosses, sources: Sequence[str], score: Callable[[np.ndarray], Any]
) -> dict[str, Any]:
    chosen = {name: losses.source == number for number, name in enumerate(sources)}
    return {
        "by_source": {name: score(tokens) for name, tokens in chosen.items() if tokens.any()},
        "all": score(np.ones(len(losses.loss), bool)),
    }
