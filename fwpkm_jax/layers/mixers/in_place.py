"""In-place test-time training: an MLP whose down projection each sequence writes."""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.documents import pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.layers.mixers.base import (
    AbstractMixer,
    AbstractMixerConfig,
    Mask,
    MixerMemory,
    Starts,
)
from fwpkm_jax.layers.mixers.registry import register_mixer
from fwpkm_jax.layers.mixers.titans_pieces import in_pieces, real_tokens
from fwpkm_jax.layers.mlp import ACTIVATIONS, Activation
from fwpkm_jax.layers.parameters import linear_map, parameter
from fwpkm_jax.literals import Count, NotNegative, check_fields


@dataclass(frozen=True, kw_only=True)
class InPlaceConfig(AbstractMixerConfig):
    """Shape of an MLP with a written down projection; the defaults are published ones."""

    hidden_dim: Count = 2304
    """Hidden units of the MLP."""
    activation: Activation = "silu"
    """Of the gate."""
    chunk_size: Count = 1024
    """Tokens between two writes."""
    learning_rate: NotNegative = 0.3
    """Factor of a write."""
    target: Literal["next", "convolution"] = "next"
    """What a token's hidden units are bound to: the layer's input at the next token, or a learned
    convolution of the inputs around the token, 0 at first. Both stay within the chunk."""
    conv_width: Count = 5
    """Tokens of that convolution, an odd number; the token is in the middle."""

    def __post_init__(self):
        check_fields(self)
        if self.conv_width % 2 == 0:
            raise ValueError(f"conv_width={self.conv_width} has no middle; take an odd number.")

    @property
    def reach(self) -> int:
        """How many tokens lie between a token and the farthest that its target depends on."""
        return 1 if self.target == "next" else self.conv_width // 2

    def build(self, model_dim: int, **shared: Any) -> "InPlaceMLP":
        return InPlaceMLP(self, model_dim, **shared)

    @property
    def label(self) -> str:
        return "in-place TTT"

    @property
    def mixer_memory(self) -> MixerMemory:
        return MixerMemory("in-place TTT", self.chunk_size)


register_mixer("in_place_ttt", InPlaceConfig())


class InPlaceCache(NamedTuple):
    """What a stream carries.

    Attributes:
      position: tokens read so far, `[batch]`.
      written: what complete chunks added to the down projection, `[batch, hidden, model]`.
      open: what the tokens of the chunk so far will add.
      hidden: hidden units of its last tokens, `[batch, reach, hidden]`, 0 before its first.
      inputs: the same tokens' inputs, `[batch, reach, model]`.
    """

    position: Int[Array, " batch"]
    written: Float[Array, "batch hidden model"]
    open: Float[Array, "batch hidden model"]
    hidden: Float[Array, "batch reach hidden"]
    inputs: Float[Array, "batch reach model"]


class InPlaceMLP(AbstractMixer):
    """`(down + D)(SiLU(gate(x)) * up(x))`; after each chunk `D += learning_rate * sum h t^T`.

    h are a token's hidden units, t the projection of its target. A chunk is read by what the chunks
    before it wrote, and each sequence begins with D = 0. At the start a model with `convolution` is
    one with plain MLPs. As a token mixer: it takes the place of attention in a layer, which keeps
    its own MLP. Left out: the published options that scale a write by its largest singular value,
    keep the rows' norms, or take embeddings as targets.

    References: arXiv:2604.06169 (`convolution`), arXiv:2606.21803 (`next`).
    """

    def __init__(
        self,
        config: InPlaceConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        del norm_eps
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)
        # Not split along hidden units: every device computes all of its sequences.
        self.config = config
        self.gate_proj = linear(model_dim, config.hidden_dim, "embed")
        self.up_proj = linear(model_dim, config.hidden_dim, "embed")
        self.down_proj = linear(config.hidden_dim, model_dim, None, "embed")
        self.target_proj = linear(model_dim, model_dim)
        # Published: a diagonal of small random numbers.
        self.target_proj.kernel[...] *= jnp.eye(model_dim, dtype=jnp.float32)
        taps = jnp.zeros((config.conv_width, model_dim), jnp.float32)
        learned = config.target == "convolution"
        self.target_conv = parameter(taps, "convolution") if learned else None

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> InPlaceCache:
        """An empty cache; its size does not depend on `max_length`."""
        del max_length
        hidden, model = self.config.hidden_dim, self.down_proj.out_features
        wide = compute_dtype(dtype)

        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros((batch, *shape), wide)

        reach = self.config.reach
        return InPlaceCache(
            position=jnp.zeros((batch,), jnp.int32),
            written=zeros(hidden, model),
            open=zeros(hidden, model),
            hidden=zeros(reach, hidden),
            inputs=zeros(reach, model),
        )

    @property
    def output_map(self) -> nnx.Linear:
        return self.down_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: InPlaceCache | None = None,
    ) -> tuple[Float[Array, "batch length model"], InPlaceCache | None]:
        """The layer's output, and the cache to continue from; see `AbstractMixer.__call__`.

        Chunks count each document's real tokens from its first.
        """
        packing = None if mask is None else pack_tokens(mask)
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)
        y, cache = in_pieces(
            self.advance,
            x,
            cache,
            lambda: self.init_cache(x.shape[0], max_length=x.shape[1], dtype=x.dtype),
            count=real_tokens(x, packing),
            starts=starts,
            chunk=self.config.chunk_size,
            position=None if cache is None else cache.position,
        )
        return unpack(y, packing), cache

    def advance(
        self,
        cache: InPlaceCache,
        x: Float[Array, "batch 1 length model"],
        count: Int[Array, " batch"],
    ) -> tuple[InPlaceCache, Float[Array, "batch 1 length model"]]:
        """A piece of a stream, all of one chunk: `within` of `core.streams.cuts.in_chunks`."""
        x, reach, wide = x[:, 0], self.config.reach, cache.written.dtype
        hidden = ACTIVATIONS[self.config.activation](self.gate_proj(x)) * self.up_proj(x)
        exact = {"precision": "highest", "preferred_element_type": wide}
        added = jnp.einsum("bth,bhm->btm", hidden.astype(wide), cache.written, **exact)
        y = self.down_proj(hidden) + added.astype(x.dtype)

        real = (jnp.arange(x.shape[1])[None] < count[:, None])[..., None]
        # With the last tokens of the piece before, of which some pairs are complete only now.
        units = jnp.concatenate([cache.hidden, jnp.where(real, hidden.astype(wide), 0)], axis=1)
        new = jnp.pad(jnp.where(real, x.astype(wide), 0), [(0, 0), (reach, 0), (0, 0)])
        known = jnp.pad(cache.inputs, [(0, 0), (0, x.shape[1]), (0, 0)])
        earlier = jnp.arange(units.shape[1])[None, :, None] < reach
        targets = jnp.where(earlier, self.targets(new), self.targets(new + known))
        targets = self.target_proj(targets).astype(wide)
        step = jnp.einsum("bth,btm->bhm", units, targets, **exact)
        open_steps = cache.open + self.config.learning_rate * step

        position = cache.position + count
        ends = ((position % self.config.chunk_size == 0) & (count > 0))[:, None, None]
        last = count[:, None, None] + jnp.arange(reach)[None, :, None]
        inputs = new + known

        def left(x: jax.Array) -> jax.Array:
            return jnp.where(ends, 0, jnp.take_along_axis(x, last, axis=1))

        after = InPlaceCache(
            position=position,
            written=jnp.where(ends, cache.written + open_steps, cache.written),
            open=jnp.where(ends, 0, open_steps),
            hidden=left(units),
            inputs=left(inputs),
        )
        return after, y[:, None]

    def targets(self, x: Float[Array, "batch length model"]) -> Float[Array, "batch length model"]:
        """The targets of tokens whose neighbours outside of x are 0."""
        reach, length = self.config.reach, x.shape[1]
        around = jnp.pad(x, [(0, 0), (reach, reach), (0, 0)])
        if self.target_conv is None:
            return around[:, 2 * reach :]
        taps = self.target_conv[...].astype(x.dtype)
        seen = jnp.stack([around[:, at : at + length] for at in range(len(taps))])
        return jnp.einsum("wblm,wm->blm", seen, taps, precision="highest")
