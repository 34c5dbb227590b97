"""The results of a decoder's passes and streams, and the state of a stream."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.documents import Documents, document_numbers
from fwpkm_jax.layers.experts import RouterLoad
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightStream
from fwpkm_jax.layers.memories.fast_weight import FastWeightInfo
from fwpkm_jax.layers.pkm import QueryStatistics
from fwpkm_jax.models.block import BlockStream


class LMOutput(NamedTuple):
    """The result of a pass over whole sequences.

    Attributes:
      logits: `[batch, length, vocab]`, float32.
      memory: fast weights after the last write, by layer name.
      info: gate, losses and metrics of each memory layer, by layer name.
      pkm_slot_ids: slots that each product-key memory layer read, `[batch, length, places]`, by
        layer name.
    """

    logits: Float[Array, "batch length vocab"]
    memory: dict[str, Memory]
    info: dict[str, FastWeightInfo]
    pkm_slot_ids: dict[str, Int[Array, "batch length places"]]


class Hidden(NamedTuple):
    """`LMOutput` before the readout.

    Attributes:
      x: `[batch, length, model]`, after the final norm; `LanguageModel.readout` turns it into
        logits.
      token_bias: a Fast Weight Layer with steps on the output bias adds this to each token's
        logits; None without such a layer.
      pkm_statistics: batch statistics of each product-key memory's queries, by layer name; empty
        without `batch_statistics`.
      router_loads: how each layer of experts distributed the tokens, by layer name.
    """

    x: Float[Array, "batch length model"]
    memory: dict[str, Memory]
    info: dict[str, FastWeightInfo]
    pkm_slot_ids: dict[str, Int[Array, "batch length places"]]
    token_bias: Float[Array, "batch length vocab"] | None
    pkm_statistics: dict[str, QueryStatistics]
    router_loads: dict[str, RouterLoad]


class StreamDocument(NamedTuple):
    """Where a stream of several documents stands, `[batch]` each.

    Attributes:
      segment_id: of the last token.
      number: of its document, counted from 1.
    """

    segment_id: Int[Array, " batch"]
    number: Int[Array, " batch"]

    @classmethod
    def of_piece(
        cls,
        segment_ids: Int[Array, "batch length"],
        mask: TokenMask | None,
        before: "StreamDocument | None",
    ) -> "PieceDocuments":
        """What a piece with these segment ids says of its documents.

        Args:
          segment_ids: document of each token, 0 for padding.
          mask: 1 for real tokens; None: all but the padding of the ids.
          before: where the stream stands; None: the first token starts a document.
        """
        documents = Documents.of(segment_ids, before=None if before is None else before.segment_id)
        begun = jnp.ones_like(segment_ids[:, 0]) if before is None else before.number
        numbers = begun[:, None] + document_numbers(documents.starts).astype(begun.dtype)
        return PieceDocuments(
            documents.mask(mask),
            documents.starts,
            numbers,
            cls(segment_ids[:, -1], numbers[:, -1]),
        )


class PieceDocuments(NamedTuple):
    """The documents of a piece of a stream.

    Attributes:
      mask: 1 for real tokens, `[batch, length]`.
      starts: true at the first token of each document, `[batch, length]`.
      numbers: of each token's document, counted along the stream, `[batch, length]`.
      last: where the stream stands behind the piece.
    """

    mask: Float[Array, "batch length"]
    starts: Bool[Array, "batch length"]
    numbers: Int[Array, "batch length"]
    last: StreamDocument


class Stream(NamedTuple):
    """The state of a stream between two pieces.

    Attributes:
      memory: fast weights by layer name.
      layers: each layer's state, by layer name.
      head: the Fast Weight Layer's state; None without one.
      document: of each sequence's last token; None before the first segment ids.
    """

    memory: dict[str, Memory]
    layers: dict[str, BlockStream]
    head: FastWeightStream | None = None
    document: StreamDocument | None = None


class StreamOutput(NamedTuple):
    """The result of a piece of a stream; `logits` of the tokens kept, `info` as in `LMOutput`."""

    logits: Float[Array, "batch length vocab"]
    stream: Stream
    info: dict[str, FastWeightInfo]


def layer_name(index: int) -> str:
    """The name of layer `index` in memories, streams and metrics."""
    return f"layer_{index}"


def memory_metrics(info: dict[str, FastWeightInfo]) -> dict[str, Float[Array, ""]]:
    """Scalars for a log: `layer_<index>/<measure>` for every memory layer of one pass."""
    metrics = {}
    for name, facts in info.items():
        metrics |= {
            f"{name}/memory_loss": facts.memory_loss,
            f"{name}/gate_mean": jnp.mean(facts.gate),
        }
        if facts.write is not None:
            fields = getattr(facts.write, "logged", facts.write._fields)  # See `rules.base`.
            metrics |= {f"{name}/{field}": getattr(facts.write, field) for field in fields}
        if facts.measures is not None:
            metrics |= {f"{name}/{key}": value for key, value in facts.measures._asdict().items()}
    return metrics
