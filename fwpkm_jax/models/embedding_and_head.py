"""A decoder's two ends: the embedding over devices, and a Fast Weight Layer before the head."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.documents import starts_at_real
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightStream, HeadInputs
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition
from pallas_kernels.embed import embed


def embed_over_devices(
    embedding: Float[Array, "vocab model"],
    tokens: Int[Array, "batch length"],
    dtype: DTypeLike | None,
    partition: Partition,
) -> Float[Array, "batch length model"]:
    """The rows of the tokens, in `dtype`, or None for that of the embedding.

    Along `model` each device looks up a part of each sequence.
    """

    def look_up(embedding, tokens):
        embedding = jax.lax.all_gather(embedding, "fsdp", axis=1, tiled=True)
        rows = embed(embedding, tokens)
        return rows if dtype is None else rows.astype(dtype)

    own = partition.tokens(also=(HEADS,))
    rows = partition.run(look_up, in_specs=(P(None, "fsdp"), own), out_specs=own)
    return partition.by_sequence(rows(embedding, tokens))


def read_head(
    layer: FastWeightLayer,
    x: Float[Array, "batch length model"],
    tokens: Int[Array, "batch length"],
    readout: tuple[jax.Array, jax.Array | None],
    stream: FastWeightStream | None,
    *,
    mask: TokenMask | None,
    starts: Bool[Array, "batch length"] | None,
    write: bool,
    partition: Partition | None,
) -> tuple[HeadInputs, FastWeightStream | None]:
    """What the head reads from a Fast Weight Layer, and the new stream.

    Args:
      x: after the final norm.
      tokens: ids.
      readout: the head's linear map and its bias.
      stream: of the tokens before; None for whole sequences.
      mask: 1 for real tokens.
      write: False takes no steps.

    Raises:
      ValueError: a layer with steps on the output bias over several devices.
    """
    options: dict[str, Any] = {"mask": mask, "starts": starts, "write": write}
    if partition is None and stream is None:
        return layer(x, tokens, readout, **options), None
    if partition is None:
        assert stream is not None
        return layer.stream(x, tokens, readout, stream, **options)
    if layer.config.steps == "output_bias":
        raise ValueError(
            "fast_weight_layer.steps='output_bias' keeps every token's logits and runs on one "
            "device only; set all sizes of the mesh to 1."
        )
    axis = partition.sequence
    if axis is not None and mask is not None and starts is not None:
        starts = starts_at_real(starts, mask)

    def of_sequences(layer, x, tokens, readout, mask, starts, stream):
        options = {"mask": mask, "starts": starts, "write": write}
        if axis is None:
            return layer(x, tokens, readout, **options).x, None
        out, end = layer.of_part(x, tokens, readout, axis=axis, stream=stream, **options)
        return out.x, None if stream is None else end

    rows, of_rows = partition.tokens(), P(BATCH)
    y, stream = partition.run(
        of_sequences,
        in_specs=(P(), rows, rows, P(), rows, rows, of_rows),
        out_specs=(rows, of_rows),
    )(layer, x, tokens, readout, mask, starts, stream)
    return HeadInputs(y, None), stream
