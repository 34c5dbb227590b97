"""Fast Weight Layers: a last layer that takes a gradient step on every token it has seen."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.normalize import layer_normalize
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.precision import compute_dtype


@dataclass(frozen=True, kw_only=True)
class FastWeightLayerConfig:
    """A Fast Weight Layer between a decoder's last norm and its head."""

    hidden_dim: int = 768
    """Width between its two matrices."""
    chunk_size: int = 64
    """Tokens whose steps are summed at once; changes speed, and results only by rounding."""
    learn: bool = True
    """False: no steps are taken, and the layer is an MLP. Touches no parameter, so a trained model
    may be evaluated with another value."""
    initial_rate: float = 0.01
    """Step size of every tensor before training, which learns one for each."""

    def __post_init__(self):
        for name in ("hidden_dim", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if not self.initial_rate > 0:
            raise ValueError(f"initial_rate={self.initial_rate} must be above 0.")


class HeadTensors(NamedTuple):
    """The layer's tensors, or as many of anything: `LN(ReLU(x up + up_bias)^2 down + down_bias)`
    with the norm's `scale` and `shift`."""

    up: jax.Array
    up_bias: jax.Array
    down: jax.Array
    down_bias: jax.Array
    scale: jax.Array
    shift: jax.Array


class TokenGradients(NamedTuple):
    """A token's loss's gradients behind each tensor, and what the matrices were multiplied by.

    Attributes:
      x: `[batch, length, model]`, in front of `up`.
      hidden: `[batch, length, hidden]`, in front of `down`.
      up: behind `up`, of `up_bias` too.
      down: behind `down`, of `down_bias` too.
      scale: of `scale`.
      shift: of `shift`.
    """

    x: jax.Array
    hidden: jax.Array
    up: jax.Array
    down: jax.Array
    scale: jax.Array
    shift: jax.Array


class FastWeightStream(NamedTuple):
    """What a stream carries.

    Attributes:
      last: the last token's input, which waits for its label, `[batch, 1, model]`.
      waits: 1 where there is one, `[batch]`.
      sums: gradients of the tokens before, leaves `[batch, ...]`.
    """

    last: Float[Array, "batch one model"]
    waits: Float[Array, " batch"]
    sums: HeadTensors


class FastWeightLayer(nnx.Module):
    """At each token, the tensors less a rate times the gradients of all earlier tokens' losses.

    The gradients are those of the slow tensors' predictions, so that the steps of a matrix on all
    earlier tokens are linear attention: what a token multiplies by asks, what the earlier ones
    multiplied by answers with their gradients. Training differentiates through them.

    References: Clark et al. 2022, arXiv:2212.02475.
    """

    def __init__(
        self, config: FastWeightLayerConfig, model_dim: int, *, init_std: float, rngs: nnx.Rngs
    ):
        self.config = config
        init, hidden = nnx.initializers.normal(init_std), config.hidden_dim

        def vector(width: int, value: float = 0.0) -> nnx.Param:
            return nnx.Param(jnp.full((width,), value, jnp.float32))

        # By the names of `HeadTensors`.
        self.tensors = nnx.Dict(
            up=nnx.Param(init(rngs.params(), (model_dim, hidden), jnp.float32)),
            up_bias=vector(hidden),
            down=nnx.Param(init(rngs.params(), (hidden, model_dim), jnp.float32)),
            down_bias=vector(model_dim),
            scale=vector(model_dim, 1.0),
            shift=vector(model_dim),
        )
        rates = jnp.full((len(HeadTensors._fields),), jnp.log(config.initial_rate), jnp.float32)
        self.log_rates = nnx.Param(rates)

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        readout: tuple[Float[Array, "model vocab"], Float[Array, " vocab"] | None],
        *,
        mask: Bool[Array, "batch length"] | Float[Array, "batch length"] | None = None,
        write: bool = True,
    ) -> Float[Array, "batch length model"]:
        """What the head reads, of whole sequences.

        Args:
          x: after the last norm.
          tokens: of which `x` was made; each is the label of the one before.
          readout: the head's matrix and bias.
          mask: 1 for real tokens, which label each other across padding.
          write: False takes no step at all.
        """
        start = self.init_stream(x.shape[0], dtype=x.dtype)
        out, _ = self.stream(x, tokens, readout, start, mask=mask, write=write)
        return out

    def init_stream(self, batch: int, *, dtype: jnp.dtype) -> FastWeightStream:
        """The start of a stream."""
        dtype = compute_dtype(dtype)
        model = self.tensors["up"][...].shape[0]
        last = jnp.zeros((batch, 1, model), dtype)
        return FastWeightStream(last, jnp.zeros((batch,), dtype), self._no_sums(last))

    def stream(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        readout: tuple[Float[Array, "model vocab"], Float[Array, " vocab"] | None],
        stream: FastWeightStream,
        *,
        mask: Bool[Array, "batch length"] | Float[Array, "batch length"] | None = None,
        write: bool = True,
    ) -> tuple[Float[Array, "batch length model"], FastWeightStream]:
        """`__call__` of a piece, continuing; the tokens before it label each other across the cut.

        Args:
          x: after the last norm.
          tokens: of the piece.
          readout: the head's matrix and bias.
          stream: from `init_stream` or the last call.
          mask: 1 for real tokens.
          write: False reads with the steps of the stream before, and takes none.
        """
        packing = None if mask is None else pack_tokens(mask)
        x = x.astype(compute_dtype(x.dtype))
        real = jnp.ones(x.shape[:2], x.dtype)
        if packing is not None:
            x, real = pack(x, packing), packing.is_real.astype(x.dtype)
            tokens = jnp.take_along_axis(tokens, packing.order, axis=1)
        # In front stands the token that waits, whose label is the first one of the piece.
        joined = jnp.concatenate([stream.last.astype(x.dtype), x], axis=1)
        last = jnp.zeros_like(tokens[:, :1])
        labels = jnp.concatenate([tokens, last], axis=1)
        follows = jnp.concatenate([real, jnp.zeros_like(real[:, :1])], axis=1)
        counted = jnp.concatenate([stream.waits[:, None], real], axis=1) * follows
        counted = counted if write else jnp.zeros_like(counted)
        out, sums = self._advance(joined, labels, counted, readout, stream.sums)
        out = out[:, 1:] if packing is None else unpack(out[:, 1:], packing)
        if not write:
            return out, stream
        # The waiting token itself where nothing real came.
        count = jnp.sum(real, axis=1).astype(jnp.int32)
        waiting = jnp.take_along_axis(joined, count[:, None, None], axis=1)
        return out, FastWeightStream(waiting, jnp.maximum(stream.waits, real[:, 0]), sums)

    def _no_sums(self, x: jax.Array) -> HeadTensors:
        tensors = self._tensors(x.dtype)
        return jax.tree.map(lambda t: jnp.zeros((x.shape[0], *t.shape), x.dtype), tensors)

    def _tensors(self, dtype: jnp.dtype) -> HeadTensors:
        return HeadTensors(**{name: p[...].astype(dtype) for name, p in self.tensors.items()})

    def _advance(self, x, labels, counted, readout, sums) -> tuple[jax.Array, HeadTensors]:
        """What the head reads at each token, and the gradients summed over all of them."""
        tensors = self._tensors(x.dtype)
        if not self.config.learn:
            return _apply(tensors, x)[0], sums
        rates = HeadTensors(*jnp.exp(self.log_rates[...].astype(x.dtype)))
        gradients = _token_gradients(tensors, readout, x, labels, counted)
        batch, length, _ = x.shape
        size = min(self.config.chunk_size, length)
        padded = -(-length // size) * size

        def split(a: jax.Array) -> jax.Array:
            a = jnp.pad(a, ((0, 0), (0, padded - length), (0, 0)))
            return jnp.moveaxis(a.reshape(batch, padded // size, size, -1), 1, 0)

        def of_chunk(sums: HeadTensors, chunk: tuple[jax.Array, TokenGradients]):
            return _of_chunk(tensors, rates, sums, *chunk)

        sums, out = jax.lax.scan(of_chunk, sums, (split(x), jax.tree.map(split, gradients)))
        return jnp.moveaxis(out, 0, 1).reshape(batch, padded, -1)[:, :length], sums


def _apply(
    tensors: HeadTensors, x: jax.Array, beside: TokenGradients | None = None
) -> tuple[jax.Array, jax.Array]:
    """The layer's output, and what `down` multiplied; `beside` is added behind each tensor."""

    def plus(y: jax.Array, name: str) -> jax.Array:
        return y if beside is None else y + getattr(beside, name)

    before = plus(x @ tensors.up + tensors.up_bias[None, None], "up")
    hidden = jnp.square(jax.nn.relu(before))
    y = plus(hidden @ tensors.down + tensors.down_bias[None, None], "down")
    scale = plus(jnp.broadcast_to(tensors.scale, y.shape), "scale")
    shift = plus(jnp.broadcast_to(tensors.shift, y.shape), "shift")
    return layer_normalize(y) * scale + shift, hidden


def _token_gradients(tensors, readout, x, labels, counted) -> TokenGradients:
    """Of each token's cross-entropy by the slow tensors, times what it counts."""
    head, bias = readout

    def loss(beside: TokenGradients) -> tuple[jax.Array, jax.Array]:
        y, hidden = _apply(tensors, x, beside)
        logits = y @ head.astype(y.dtype)
        logits = logits if bias is None else logits + bias.astype(y.dtype)[None, None]
        right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.sum(counted * (jax.nn.logsumexp(logits, axis=-1) - right)), hidden

    narrow, wide = jnp.zeros_like(x), jnp.zeros((*x.shape[:2], tensors.up.shape[1]), x.dtype)
    nothing = TokenGradients(narrow, wide, wide, narrow, narrow, narrow)
    gradients, hidden = jax.grad(loss, has_aux=True)(nothing)
    return gradients._replace(x=x, hidden=hidden)


def _of_chunk(
    tensors: HeadTensors,
    rates: HeadTensors,
    sums: HeadTensors,
    x: jax.Array,
    tokens: TokenGradients,
) -> tuple[HeadTensors, jax.Array]:
    """A chunk's outputs, each with the gradients of all tokens before it."""

    def stepped(rate, asks, answers, gradients, total):
        """What steps on a matrix add behind it: strictly causal linear attention."""
        scores = jnp.tril(asks @ jnp.swapaxes(answers, 1, 2), -1)
        return -rate * (asks @ total + scores @ gradients)

    def shifted(rate, gradients, total):
        return -rate * (total[:, None] + jnp.cumsum(gradients, axis=1) - gradients)

    up = stepped(rates.up, x, tokens.x, tokens.up, sums.up)
    up = up + shifted(rates.up_bias, tokens.up, sums.up_bias)
    hidden = jnp.square(jax.nn.relu(x @ tensors.up + tensors.up_bias[None, None] + up))
    down = stepped(rates.down, hidden, tokens.hidden, tokens.down, sums.down)
    down = down + shifted(rates.down_bias, tokens.down, sums.down_bias)
    y = layer_normalize(hidden @ tensors.down + tensors.down_bias[None, None] + down)
    scale = tensors.scale[None, None] + shifted(rates.scale, tokens.scale, sums.scale)
    shift = tensors.shift[None, None] + shifted(rates.shift, tokens.shift, sums.shift)
    added = HeadTensors(
        up=jnp.swapaxes(tokens.x, 1, 2) @ tokens.up,
        up_bias=tokens.up.sum(1),
        down=jnp.swapaxes(tokens.hidden, 1, 2) @ tokens.down,
        down_bias=tokens.down.sum(1),
        scale=tokens.scale.sum(1),
        shift=tokens.shift.sum(1),
    )
    return jax.tree.map(jnp.add, sums, added), y * scale + shift
