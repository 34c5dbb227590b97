"""LaCT: windowed attention and a fast SwiGLU that share queries, keys and values."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.attention.softmax import token_positions, whole_sequence_attention
from fwpkm_jax.core.checks import check_rngs
from fwpkm_jax.core.documents import pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import Packing, pack, pack_tokens, unpack
from fwpkm_jax.layers.mixers.base import (
    AbstractMixer,
    AbstractMixerConfig,
    Mask,
    MixerMemory,
    Starts,
)
from fwpkm_jax.layers.mixers.lact_stream import FastStream, FastTokens, read_documents, read_whole
from fwpkm_jax.layers.mixers.registry import register_mixer
from fwpkm_jax.layers.mixers.window_cache import AttentionCache, attend_window
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.parameters import Role, linear_map, parameter
from fwpkm_jax.layers.rotary import YarnConfig, apply_rotary, rotary_frequencies
from fwpkm_jax.literals import Count, Positive, check_fields
from fwpkm_jax.rules.lact import LaCTMemory, LaCTRule, SwiGLUWeights

_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class LaCTConfig(AbstractMixerConfig):
    """Shape of a LaCT layer; the defaults are those of the paper's baseline."""

    num_heads: Count = 12
    """Attention heads; they divide the model's width."""
    num_fast_heads: Count = 4
    """Fast networks per sequence; they divide the model's width."""
    hidden_dim: Count = 192
    """Hidden width of a fast network."""
    chunk_size: Count = 512
    """Tokens between two writes."""
    window: Count = 2048
    """Tokens that attention sees, the query's own included."""
    low_rank: Count | None = 32
    """Rank of what the initial gate and up matrices add to half the identity; None: both are whole
    matrices, without the identity (-1 in the published code)."""
    base_rate: Positive = 1e-3
    """Step size where the projection of the rates gives 0."""
    qk_norm: bool = False
    """Norms queries and keys, all heads together, before both uses."""
    value_silu: bool = False
    """Applies SiLU to the fast networks' values too, not only to their queries and keys."""
    rotary_fast: bool = True
    """Rotates the fast networks' queries and keys by position too."""
    pre_norm: bool = False
    """See `LaCTRule`."""
    muon: bool = False
    """See `LaCTRule`."""
    momentum: bool = True
    """Keeps a share of the last step: the chunk's mean of the sigmoid of a projection."""
    read_scale: bool = True
    """Multiplies what each fast network reads by a number per token, SiLU of a projection."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies, over the whole of each head."""
    yarn: YarnConfig | None = None
    """Stretching of the positions to longer contexts; see `AttentionConfig`."""

    def __post_init__(self):
        check_fields(self)
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must exceed 1; usual is 10000.")

    def build(self, model_dim: int, **shared: Any) -> "LaCT":
        return LaCT(self, model_dim, **shared)

    @property
    def mixer_memory(self) -> MixerMemory:
        return MixerMemory("LaCT", self.chunk_size)


register_mixer("lact", lambda model: model.lact)


class LaCTCache(NamedTuple):
    """What a stream carries: the window's keys and values, and the fast networks."""

    attention: AttentionCache
    fast: FastStream


class LaCT(AbstractMixer):
    """The sum of windowed attention and the reads of a fast SwiGLU per sequence and head.

    Every sequence starts with the same learned fast weights. They are written after each chunk and
    kept in the cache of a stream. The read is normed per head and scaled per token and head.

    References: Zhang et al. 2025, arXiv:2505.23884.
    """

    def __init__(
        self,
        config: LaCTConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Args: `dtype` of activations, None for the input's; parameters are float32.

        Raises:
          ValueError: `model_dim` does not divide into the heads.
        """
        check_rngs(rngs)
        for name in ("num_heads", "num_fast_heads"):
            if model_dim % getattr(config, name):
                raise ValueError(
                    f"model_dim={model_dim} does not divide into {name}={getattr(config, name)}."
                )
        # Not split along heads: every device computes all heads of its sequences.
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)

        def normal(*shape: int, fan_in: int, gain: float = 1.0) -> nnx.Param:
            noise = jax.random.normal(rngs.params(), shape, jnp.float32)
            return parameter(noise * gain * fan_in**-0.5, "matrix")

        self.config = config
        heads, width = config.num_fast_heads, model_dim // config.num_fast_heads
        self.head_dim = model_dim // config.num_heads
        self.rule = LaCTRule(
            key_dim=width,
            value_dim=width,
            hidden_dim=config.hidden_dim,
            pre_norm=config.pre_norm,
            muon=config.muon,
        )
        self.qkv_proj = linear(model_dim, 3 * model_dim)
        self.o_proj = linear(model_dim, model_dim, "heads", "embed")
        self.q_norm = RMSNorm(model_dim, eps=norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(model_dim, eps=norm_eps) if config.qk_norm else None

        def vector(role: Role, value: float) -> nnx.Param:
            return parameter(jnp.full((model_dim,), value, jnp.float32), role)

        self.fast_query_scale, self.fast_query_shift = vector("scale", 1.0), vector("bias", 0.0)
        self.fast_key_scale, self.fast_key_shift = vector("scale", 1.0), vector("bias", 0.0)
        hidden, rank = config.hidden_dim, config.low_rank
        if rank is None:
            self.gate_left = self.gate_right = self.up_left = self.up_right = None
            self.gate = normal(heads, hidden, width, fan_in=width)
            self.up = normal(heads, hidden, width, fan_in=width)
        else:
            self.gate = self.up = None
            self.gate_left = normal(heads, hidden, rank, fan_in=rank, gain=0.5)
            self.gate_right = normal(heads, rank, width, fan_in=width, gain=0.5)
            self.up_left = normal(heads, hidden, rank, fan_in=rank, gain=0.5)
            self.up_right = normal(heads, rank, width, fan_in=width, gain=0.5)
        self.down = normal(heads, width, hidden, fan_in=hidden)
        self.rate_proj = linear(model_dim, 3 * heads, use_bias=True)
        self.momentum_proj = linear(model_dim, heads, use_bias=True) if config.momentum else None
        self.scale_proj = linear(model_dim, heads, use_bias=True) if config.read_scale else None
        self.fast_norm = RMSNorm(width, eps=_NORM_EPSILON)

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> LaCTCache:
        heads, head, window = self.config.num_heads, self.head_dim, self.config.window
        attention = AttentionCache(
            keys=jnp.zeros((batch, window, heads, head), dtype),
            values=jnp.zeros((batch, window, heads, head), dtype),
            positions=jnp.full((batch, window), -1, jnp.int32),
            next_position=jnp.zeros((batch,), jnp.int32),
        )
        fast = FastStream.start(
            self.initial_memory(batch, dtype), chunk_size=self.config.chunk_size
        )
        return LaCTCache(attention, fast)

    def initial_memory(self, batch: int, dtype: DTypeLike) -> LaCTMemory:
        """The learned fast weights for every sequence, leaves `[batch, heads, ...]`."""
        # Cast first: the products, too, are computed in the memory's dtype.
        dtype = compute_dtype(dtype, jnp.float32)
        half = 0.5 * jnp.eye(self.config.hidden_dim, self.rule.key_dim, dtype=dtype)[None]

        def start(whole: nnx.Param | None, left: Any, right: Any) -> jax.Array:
            if whole is not None:
                return whole[...].astype(dtype)
            return left[...].astype(dtype) @ right[...].astype(dtype) + half

        weights = SwiGLUWeights(
            gate=start(self.gate, self.gate_left, self.gate_right),
            down=self.down[...].astype(dtype),
            up=start(self.up, self.up_left, self.up_right),
        )
        memory = jax.vmap(self.rule.start)(weights)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), memory)

    @property
    def output_map(self) -> nnx.Linear:
        return self.o_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: LaCTCache | None = None,
    ) -> tuple[Float[Array, "batch length model"], LaCTCache | None]:
        """Chunks count each sequence's real tokens from its first."""
        batch, length, _ = x.shape
        packing = None if mask is None else pack_tokens(mask)
        first = None if cache is None else cache.attention.next_position
        positions, documents = token_positions(starts, packing, shape=(batch, length), first=first)
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)

        query, key, value = jnp.split(self.qkv_proj(x), 3, axis=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        tokens = self.fast_tokens(x, query, key, value, positions)
        # Weights that documents begin with; a stream of one document has them in its cache.
        memory = None
        if cache is None or starts is not None:
            memory = self.initial_memory(batch, x.dtype)
        attention = None if cache is None else cache.attention
        attended, attention = self.attend(
            query, key, value, positions, attention, packing, documents
        )
        if cache is None:
            assert memory is not None
            options = {"chunk_size": self.config.chunk_size}
            if starts is None:
                read = read_whole(self.rule, memory, tokens, **options)
            else:
                read = read_documents(self.rule, memory, tokens, starts, **options)
        else:
            assert attention is not None
            read, fast = cache.fast.push(self.rule, tokens, fresh=memory, starts=starts)
            cache = LaCTCache(attention, fast)
        # Reads grow with the written weights; the norm keeps them beside attention's output.
        read = self.fast_norm(read)
        if self.scale_proj is not None:
            read = read * jax.nn.silu(self.scale_proj(x))[..., None].astype(read.dtype)
        y = self.o_proj(attended + read.reshape(x.shape).astype(attended.dtype))
        return unpack(y, packing), cache

    def fast_tokens(
        self,
        x: Float[Array, "batch length model"],
        query: Float[Array, "batch length model"],
        key: Float[Array, "batch length model"],
        value: Float[Array, "batch length model"],
        positions: Int[Array, "batch length"],
    ) -> FastTokens:
        """The inputs of the fast networks for each token, in at least float32."""
        config, shape = self.config, (*x.shape[:2], self.config.num_fast_heads, -1)
        dtype = compute_dtype(x.dtype)

        def address(x: jax.Array, scale: nnx.Param, shift: nnx.Param) -> jax.Array:
            x = jax.nn.silu(x.astype(dtype) * scale[...][None, None] + shift[...][None, None])
            # At unit length, so that a step changes what a key reads by its rate.
            x = _unit(x.reshape(shape))
            if config.rotary_fast:
                # In the layout of the attention heads, as published; the fast heads are wider.
                x = self._rotate(x.reshape(*x.shape[:2], config.num_heads, -1), positions)
            return x.reshape(shape)

        value = value.astype(dtype).reshape(shape)
        base = np.log(np.expm1(config.base_rate))  # softplus(base) = base_rate
        rates = jax.nn.softplus(self.rate_proj(x).astype(dtype) + base)
        # Without momentum the rule still averages this over a chunk: 0 keeps nothing.
        momentum = jnp.zeros((*x.shape[:2], config.num_fast_heads), dtype)
        if self.momentum_proj is not None:
            momentum = jax.nn.sigmoid(self.momentum_proj(x).astype(dtype))
        return FastTokens(
            query=address(query, self.fast_query_scale, self.fast_query_shift),
            key=address(key, self.fast_key_scale, self.fast_key_shift),
            value=jax.nn.silu(value) if config.value_silu else value,
            rates=rates.reshape(shape),
            momentum=momentum,
            real=(positions >= 0).astype(dtype),
        )

    def attend(
        self,
        query: Float[Array, "batch length model"],
        key: Float[Array, "batch length model"],
        value: Float[Array, "batch length model"],
        positions: Int[Array, "batch length"],
        cache: AttentionCache | None,
        packing: Packing | None,
        documents: Int[Array, "batch length"] | None = None,
    ) -> tuple[Float[Array, "batch length model"], AttentionCache | None]:
        """Attention over the window, within the document or to the cached tokens too."""
        heads = (*query.shape[:2], self.config.num_heads, self.head_dim)
        query = self._rotate(query.reshape(heads), positions)
        key, value = self._rotate(key.reshape(heads), positions), value.reshape(heads)
        if cache is None:
            output = whole_sequence_attention(
                query,
                key,
                value,
                positions=positions,
                window=self.config.window,
                backend="xla",
                documents=documents,
            )
        else:
            counts = None if packing is None else packing.counts
            output, cache = attend_window(
                query, key, value, positions, cache, counts, documents=documents
            )
        return output.reshape(*query.shape[:2], -1), cache

    def _rotate(
        self, x: Float[Array, "batch length heads head"], positions: Int[Array, "batch length"]
    ) -> Float[Array, "batch length heads head"]:
        config = self.config
        rotary = rotary_frequencies(self.head_dim, theta=config.rope_theta, scaling=config.yarn)
        return apply_rotary(x, positions, rotary=rotary)


def _unit(x: Float[Array, "*dims features"]) -> Float[Array, "*dims features"]:
    """`x / (|x| + 1e-5)`, with slope 0 at 0."""
    squares = jnp.sum(x**2, axis=-1, keepdims=True)
    norm = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    return x / (norm + _NORM_EPSILON)
