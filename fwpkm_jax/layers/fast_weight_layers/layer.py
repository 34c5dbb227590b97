"""Fast Weight Layers: a last layer that takes a gradient step on every token it has seen."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays, check_rngs
from fwpkm_jax.core.documents import document_numbers, document_positions, pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.sequential import sequential_pass
from fwpkm_jax.layers.fast_weight_layers.steps import (
    HeadTensors,
    Segments,
    Step,
    Sums,
    advance_head,
    apply_head,
    head_logits,
    move_vector,
    token_gradients,
)
from fwpkm_jax.layers.parameters import LogicalAxes, Role, parameter
from fwpkm_jax.literals import Checked, Count, OpenShare, Positive

Readout = tuple[Float[Array, "model vocab"], Float[Array, " vocab"] | None]
"""The head's matrix and bias."""


@dataclass(frozen=True, kw_only=True)
class FastWeightLayerConfig(Checked):
    """A Fast Weight Layer between a decoder's last norm and its head."""

    hidden_dim: Count = 768
    """Width between its two matrices."""
    chunk_size: Count = 64
    """Tokens whose steps are summed at once; changes speed, and results only by rounding."""
    steps: Literal["all", "output_bias", "none"] = "all"
    """What moves: the layer's tensors; the bias of the head's logits alone, which can do no more
    than repeat tokens seen before, as an ablation; or nothing. all and none have the same
    parameters, so a model trained with one may be evaluated with the other."""
    segment_length: Count | None = None
    """The recurrent form: of the steps on segments of so many tokens, those before the last one
    fade by a learned factor with each segment. None: no step fades."""
    initial_rate: Positive = 1e-4
    """Step size of every tensor before training, which learns one for each. The steps of all tokens
    add up: at 1,024 tokens 0.01 made a small model worse (docs/explanation/family.md)."""
    initial_decay: OpenShare = 0.9
    """Share of a tensor's faded steps kept per segment before training."""


class HeadInputs(NamedTuple):
    """What the head reads.

    Attributes:
      x: `[batch, length, model]`.
      bias: added to each token's logits, if the steps move the output bias; else None.
    """

    x: Float[Array, "batch length model"]
    bias: Float[Array, "batch length vocab"] | None


class FastWeightStream(NamedTuple):
    """What a stream carries.

    Attributes:
      last: the last token's input, which waits for its label, `[batch, 1, model]`.
      waits: 1 if a token waits, else 0, `[batch]`.
      position: tokens read so far, `[batch]`.
      sums: gradients of the tokens before: a `Sums` for each tensor, or of the output bias.
    """

    last: Float[Array, "batch one model"]
    waits: Float[Array, " batch"]
    position: Int[Array, " batch"]
    sums: HeadTensors | Sums


class FastWeightLayer(nnx.Module):
    """Applies at each token its tensors minus a rate times the gradients of all earlier losses.

    The gradients are taken at the slow tensors. The steps of a matrix on all earlier tokens are
    then linear attention: a token's input to the matrix is the query, the inputs of earlier tokens
    are the keys, and their gradients are the values. Training differentiates through the steps.

    With segments, the gradients of the previous segment have weight 1, those of the segment before
    it `decay`, then `decay**2` and so on, as in the paper between two pieces of a text. Training
    differentiates through earlier segments too; the paper does not.

    References: Clark et al. 2022, arXiv:2212.02475.
    """

    def __init__(
        self,
        config: FastWeightLayerConfig,
        model_dim: int,
        *,
        init_std: float = 0.02,
        rngs: nnx.Rngs,
    ):
        check_rngs(rngs)
        self.config = config
        init, hidden = nnx.initializers.normal(init_std), config.hidden_dim

        def vector(role: Role, width: int, value: jax.Array | float = 0.0) -> nnx.Param:
            return parameter(jnp.full((width,), value, jnp.float32), role)

        def matrix(*shape: int, axes: LogicalAxes) -> nnx.Param:
            return parameter(init(rngs.params(), shape, jnp.float32), "matrix", axes)

        # By the names of `HeadTensors`.
        self.tensors = nnx.Dict(
            up=matrix(model_dim, hidden, axes=("embed", None)),
            up_bias=vector("bias", hidden),
            down=matrix(hidden, model_dim, axes=(None, "embed")),
            down_bias=vector("bias", model_dim),
            scale=vector("norm_scale", model_dim, 1.0),
            shift=vector("bias", model_dim),
        )
        moving = 1 if config.steps == "output_bias" else len(HeadTensors._fields)
        # As logarithms, so that rates stay positive however they are trained.
        self.log_rates = vector("gate", moving, jnp.log(config.initial_rate))
        # The logit of the initial share, without the rounding of 1 - decay.
        odds = jnp.log(config.initial_decay) - jnp.log1p(-config.initial_decay)
        self.decay_logits = vector("gate", moving, odds) if config.segment_length else None

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        readout: Readout,
        *,
        mask: TokenMask | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        write: bool = True,
    ) -> HeadInputs:
        """What the head reads, of whole sequences.

        Args:
          x: after the last norm.
          tokens: of which `x` was made; each is the label of the one before.
          readout: of the model.
          mask: 1 for real tokens, which label each other across padding.
          starts: true at the first token of each document, which labels no token and finds the slow
            tensors; None: a sequence is one document.
          write: False takes no step at all.
        """
        vocab = readout[0].shape[1]
        start = self.init_stream(x.shape[0], vocab=vocab, dtype=x.dtype)
        out, _ = self.stream(x, tokens, readout, start, mask=mask, starts=starts, write=write)
        return out

    def of_part(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        readout: Readout,
        *,
        axis: SequenceAxis,
        mask: TokenMask | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        stream: FastWeightStream | None = None,
        write: bool = True,
    ) -> tuple[HeadInputs, FastWeightStream]:
        """`stream` of this device's part of each sequence, inside `jax.shard_map`.

        Each device waits for the steps of the device before (`core.sequence.sequential`).

        Args:
          x: of this device's tokens, like the next argument.
          tokens: of which `x` was made.
          mask: of this device's tokens, 1 for real ones.
          starts: true at the first token of each document in this part, never at padding.
          stream: of the tokens before the whole sequence; None: there are none.
          write: as in `stream`.

        Returns:
          What the head reads of this part, and on every device the stream after the last part.
        """
        start = stream
        if start is None:
            start = self.init_stream(x.shape[0], vocab=readout[0].shape[1], dtype=x.dtype)

        def read(stream: FastWeightStream, part: Any) -> tuple[HeadInputs, FastWeightStream]:
            x, tokens, mask, starts = part
            return self.stream(x, tokens, readout, stream, mask=mask, starts=starts, write=write)

        part = (x, tokens, mask, starts)
        # Without steps no device waits for the one before.
        if not write:
            return read(start, part)[0], start
        # First the sums before each part, then all parts are read side by side.
        before = sequential_pass(lambda *one: read(*one)[1], start, part, axis=axis)
        out, end = read(before, part)
        return out, axis.from_last(end)

    def init_stream(self, batch: int, *, vocab: int, dtype: jnp.dtype) -> FastWeightStream:
        """The start of a stream of a model with `vocab` tokens."""
        dtype = compute_dtype(dtype)

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((batch, *shape), dtype)

        def no_sums(*shape: int) -> Sums:
            return Sums(zeros(*shape), zeros(*shape) if self.config.segment_length else None)

        tensors = self._tensors(dtype)
        return FastWeightStream(
            last=zeros(1, tensors.up.shape[0]),
            waits=zeros(),
            position=jnp.zeros((batch,), jnp.int32),
            sums=no_sums(vocab)
            if self.config.steps == "output_bias"
            else HeadTensors._make(no_sums(*tensor.shape) for tensor in tensors),
        )

    def stream(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        readout: Readout,
        stream: FastWeightStream,
        *,
        mask: TokenMask | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        write: bool = True,
    ) -> tuple[HeadInputs, FastWeightStream]:
        """`__call__` of a piece, continuing; the tokens before it label each other across the cut.

        Args:
          x: after the last norm.
          tokens: of the piece.
          readout: of the model.
          stream: from `init_stream` or the last call.
          mask: 1 for real tokens.
          starts: as in `__call__`; before the first one the stream's document goes on.
          write: False reads with the steps of the stream before, and takes none.
        """
        check_arrays(
            x=(x, "float batch length model"),
            tokens=(tokens, "int batch length"),
            mask=(mask, "mask batch length"),
            starts=(starts, "mask batch length"),
            sizes={"model": self.tensors["up"].shape[0]},
        )
        # Padding goes behind: real tokens label each other across it.
        packing = None if mask is None else pack_tokens(mask)
        x = x.astype(compute_dtype(x.dtype))
        real = jnp.ones(x.shape[:2], x.dtype)
        if packing is not None:
            x, real = pack(x, packing), packing.is_real.astype(x.dtype)
            tokens = jnp.take_along_axis(tokens, packing.order, axis=1)
        starts = None if starts is None else pack_starts(starts.astype(bool), packing)
        # The waiting token comes first; its label is the first token of the piece.
        joined = jnp.concatenate([stream.last.astype(x.dtype), x], axis=1)
        last = jnp.zeros_like(tokens[:, :1])
        labels = jnp.concatenate([tokens, last], axis=1)
        follows = jnp.concatenate([real, jnp.zeros_like(real[:, :1])], axis=1)
        # A token counts if its label has come.
        counted = jnp.concatenate([stream.waits[:, None], real], axis=1) * follows
        counted = counted if write else jnp.zeros_like(counted)
        if starts is not None:  # A document's first token is no label of the one before.
            counted = counted * jnp.pad(1 - starts.astype(x.dtype), ((0, 0), (0, 1)))
        # Behind the last real token, the position is that of the last real token.
        count = jnp.sum(real, axis=1).astype(jnp.int32)
        ahead = jnp.minimum(jnp.arange(joined.shape[1], dtype=jnp.int32)[None], count[:, None])
        position = jnp.maximum(stream.position[:, None] - 1 + ahead, 0)
        numbers, following = None, stream.position + count
        if starts is not None:
            of_piece = document_positions(starts, first=stream.position)
            position = jnp.concatenate([position[:, :1], of_piece], axis=1)
            position = jnp.take_along_axis(position, ahead, axis=1)
            following = jnp.where(count > 0, position[:, -1] + 1, stream.position)
            numbers = jnp.pad(document_numbers(starts), ((0, 0), (1, 0)))
        out, sums = self._advance(joined, labels, counted, readout, stream.sums, position, numbers)
        out = jax.tree.map(lambda x: x[:, 1:], out)
        out = jax.tree.map(lambda x: unpack(x, packing), out)
        if not write:
            return out, stream
        # The same token waits on where the piece has no real token.
        waiting = jnp.take_along_axis(joined, count[:, None, None], axis=1)
        waits = jnp.maximum(stream.waits, real[:, 0])
        return out, FastWeightStream(waiting, waits, following, sums)

    def _tensors(self, dtype: jnp.dtype) -> HeadTensors:
        return HeadTensors(**{name: p[...].astype(dtype) for name, p in self.tensors.items()})

    def _steps(self, dtype: jnp.dtype) -> list[Step]:
        rates = jnp.exp(self.log_rates[...].astype(dtype))
        if self.decay_logits is None:
            return [Step(rate, None) for rate in rates]
        decays = jax.nn.sigmoid(self.decay_logits[...].astype(dtype))
        return [Step(rate, decay) for rate, decay in zip(rates, decays, strict=True)]

    def _advance(
        self, x, labels, counted, readout, sums, position, numbers
    ) -> tuple[HeadInputs, HeadTensors | Sums]:
        """What the head reads at each token, and the gradients summed over all of them."""
        tensors, steps = self._tensors(x.dtype), self._steps(x.dtype)
        if self.config.steps == "none":
            return HeadInputs(apply_head(tensors, x)[0], None), sums
        # Without a length, all tokens are of one segment.
        segment = position // (self.config.segment_length or 2**30)
        if self.config.steps == "output_bias":
            y, _ = apply_head(tensors, x)
            right = jax.nn.one_hot(labels, readout[0].shape[1], dtype=y.dtype)
            # The gradient of the cross-entropy by a bias of the logits, written out.
            gradients = (jax.nn.softmax(head_logits(y, readout)) - right) * counted[..., None]

            def move(sums, segments, gradients):
                bias, sums = move_vector(steps[0], gradients, sums, segments)
                return sums, bias

            sums, bias = self._in_chunks(move, sums, segment, numbers, gradients)
            return HeadInputs(y, bias), sums

        def of_chunk(sums, segments, chunk):
            x, gradients = chunk
            return advance_head(tensors, HeadTensors._make(steps), sums, x, gradients, segments)

        # At the slow tensors, so that the order of steps does not matter and chunks can sum them.
        gradients = token_gradients(tensors, readout, x, labels, counted)
        sums, out = self._in_chunks(of_chunk, sums, segment, numbers, (x, gradients))
        return HeadInputs(out, None), sums

    def _in_chunks(self, of_chunk, sums, segment, numbers, tokens):
        """`of_chunk(sums, segments, chunk) -> (sums, output)` over chunks, outputs joined.

        `numbers` says how many documents have started up to each token, None for none.
        """
        batch, length = segment.shape
        size = min(self.config.chunk_size, length)
        padded = -(-length // size) * size

        def split(a: jax.Array, mode: str = "constant") -> jax.Array:
            widths = [(0, 0), (0, padded - length)] + [(0, 0)] * (a.ndim - 2)
            a = jnp.pad(a, widths, mode=mode)
            return jnp.moveaxis(a.reshape(batch, padded // size, size, *a.shape[2:]), 1, 0)

        def body(carry, chunk):
            (sums, current, before), (index, numbers, tokens) = carry, chunk
            started = None if numbers is None else numbers - before[:, None]
            sums, out = of_chunk(sums, Segments(index, current, started), tokens)
            return (sums, index[:, -1], None if numbers is None else numbers[:, -1]), out

        numbered = None if numbers is None else split(numbers, "edge")
        # Filled up with the last number, so that no segment ends in the padding.
        chunks = split(segment, "edge"), numbered, jax.tree.map(split, tokens)
        start = sums, segment[:, 0], None if numbers is None else jnp.zeros_like(numbers[:, 0])
        (sums, *_), out = jax.lax.scan(body, start, chunks)
        return sums, jnp.moveaxis(out, 0, 1).reshape(batch, padded, -1)[:, :length]
