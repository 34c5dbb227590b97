"""Gated softmax attention, full or over a sliding window."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.attention.cached import RingCache, larger_ring, put_in_ring, ring_attention
from fwpkm_jax.core.attention.softmax import (
    AttentionBackend,
    Persistent,
    token_positions,
    whole_sequence_attention,
)
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.sequence.axis import Positions, SequenceAxis, positions_of_part
from fwpkm_jax.layers.mixers.attention_shard import Cache, attend_shard
from fwpkm_jax.layers.mixers.base import (
    AbstractMixer,
    AbstractMixerConfig,
    Mask,
    ReadBefore,
    Starts,
)
from fwpkm_jax.layers.mixers.registry import register_mixer
from fwpkm_jax.layers.mixers.window_cache import (
    AttentionCache,
    attend_window,
)
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.parameters import linear_map
from fwpkm_jax.layers.partition import BATCH, HEADS, SEQUENCE, Partition
from fwpkm_jax.layers.rotary import (
    Llama3Scaling,
    YarnConfig,
    apply_rotary,
    rotary_frequencies,
)
from fwpkm_jax.literals import Count, Positive, check_fields


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(AbstractMixerConfig):
    """Shape of a softmax attention layer; the defaults are the paper's."""

    num_heads: Count = 12
    """Query heads."""
    num_kv_heads: Count = 4
    """Key and value heads, each shared by `num_heads / num_kv_heads` query heads."""
    head_dim: Count = 64
    """Width of every head."""
    window: Count | None = None
    """Tokens a query sees, itself included; None for all before it."""
    rotary_fraction: float = 0.25
    """Share of each head, from its start, that carries the position; 0: none."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    yarn: YarnConfig | None = None
    """Stretching of the positions to longer contexts. Touches no parameter, so a trained model
    may be evaluated with another one."""
    llama3: Llama3Scaling | None = None
    """Llama 3's stretching instead."""
    linear_scaling: Positive | None = None
    """Divides positions by this instead."""
    gated: bool = True
    """Multiplies the heads' output by the sigmoid of a projection of the input."""
    qk_norm: Literal["head", "all", "none"] = "head"
    """What of queries and keys is normed together: each head, all heads, or nothing."""
    norm_offset: bool = True
    """Norms of queries and keys multiply by 1 + weight; off: by weight."""
    bias: bool = False
    """Adds biases in the maps to queries, keys, values and output."""
    output_bias: bool | None = None
    """Whether the map to the output has a bias. None: as `bias` says."""
    score_dim: Count | None = None
    """Scores are divided by the square root of this. None: of `head_dim`."""
    backend: AttentionBackend = "auto"
    """Of whole sequences: cudnn runs or raises, xla is plain JAX, auto takes cuDNN where it runs.
    Streams are plain JAX."""

    def __post_init__(self):
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}; query heads share key heads evenly."
            )
        if self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must exceed 1; usual is 10000.")
        turns = 0 < self.rotary_fraction <= 1 and self.rotary_dim >= 2 and self.rotary_dim % 2 == 0
        if self.rotary_fraction != 0 and not turns:
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} turns "
                f"{self.rotary_dim} dimensions; choose a share in (0, 1] that gives an even "
                "number, or 0 for no positions."
            )
        scalings = ("yarn", "llama3", "linear_scaling")
        given = [name for name in scalings if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} all stretch the positions; set one of them, the others to "
                "None."
            )

    @property
    def has_output_bias(self) -> bool:
        """Whether the map to the output has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that carry the position."""
        return int(self.head_dim * self.rotary_fraction)

    def build(self, model_dim: int, **shared: Any) -> "Attention":
        return Attention(self, model_dim, **shared)

    @property
    def label(self) -> str:
        seen = "all tokens" if self.window is None else f"the last {self.window:,} tokens"
        return f"attention over {seen}"

    @property
    def split_numbers(self) -> Mapping[str, int]:
        return {
            "attention.num_heads": self.num_heads,
            "attention.num_kv_heads": self.num_kv_heads,
        }

    @property
    def receptive_field(self) -> int | None:
        return self.window

    def in_window(self, window: int) -> "AttentionConfig | None":
        return replace(self, window=window) if self.window is None else None


register_mixer("attention", lambda model: replace(model.attention, window=None))
register_mixer("swa", lambda model: replace(model.attention, window=model.window))


class AttentionInputs(NamedTuple):
    """What the projections make of a token: normalised and rotated, the gate before sigmoid."""

    query: Float[Array, "batch length heads head"]
    key: Float[Array, "batch length kv_heads head"]
    value: Float[Array, "batch length kv_heads head"]
    gate: Float[Array, "batch length heads head"] | None


class Attention(AbstractMixer):
    """Softmax attention with normalised queries and keys, and a sigmoid gate on its output.

    `q_proj` yields for each head its query, then its gate, as published weights have it.

    References: Qiu et al. 2025, arXiv:2505.06708 (gate); Henry et al. 2020, arXiv:2010.04245
    (query and key norm); Ainslie et al. 2023, arXiv:2305.13245 (shared key heads).
    """

    def __init__(
        self,
        config: AttentionConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        # Kernels lie with their heads, so that devices along `model` have whole heads.
        options: dict[str, Any] = {"init_std": init_std, "use_bias": config.bias, "dtype": dtype}
        linear = functools.partial(linear_map, **options, rngs=rngs)
        self.config = config
        heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = linear(model_dim, heads * (1 + config.gated), "embed", "heads")
        self.k_proj = linear(model_dim, keys, "embed", "heads")
        self.v_proj = linear(model_dim, keys, "embed", "heads")
        self.o_proj = linear(heads, model_dim, "heads", "embed", use_bias=config.has_output_bias)

        def norm(heads: int) -> RMSNorm | None:
            if config.qk_norm == "none":
                return None
            dim = config.head_dim * (heads if config.qk_norm == "all" else 1)
            return RMSNorm(dim, eps=norm_eps, offset=config.norm_offset)

        self.q_norm = norm(config.num_heads)
        self.k_norm = norm(config.num_kv_heads)

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> Cache:
        """Full attention keeps `max_length` tokens, and a longer stream attends to the latest ones.

        Windowed attention keeps its window whatever `max_length` says.
        """
        capacity = max_length if self.config.window is None else self.config.window
        shape = (batch, capacity, self.config.num_kv_heads, self.config.head_dim)
        # Full attention writes its long cache in place; a window's is copied at every call.
        kind = RingCache if self.config.window is None else AttentionCache
        return kind(
            keys=jnp.zeros(shape, dtype),
            values=jnp.zeros(shape, dtype),
            positions=jnp.full((batch, capacity), -1, jnp.int32),
            next_position=jnp.zeros((batch,), jnp.int32),
        )

    def capacity(self, cache: Cache) -> int | None:
        return cache.keys.shape[1] if self.config.window is None else None

    def grow_cache(self, cache: Cache, max_length: int) -> Cache:
        return larger_ring(cache, max_length) if isinstance(cache, RingCache) else cache

    @property
    def output_map(self) -> nnx.Linear:
        return self.o_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: Cache | None = None,
        persistent: Float[Array, "persistent model"] | None = None,
        before: ReadBefore | None = None,
        axis: SequenceAxis | None = None,
    ) -> tuple[Float[Array, "batch length model"], Cache | None]:
        """See `AbstractMixer.mix`.

        Args:
          persistent: tokens that every token sees beside its window, as if they stood right before
            its document; the same in each call of a stream.
          before: with `starts`, tokens that stand before each document, in its window.
          axis: over which the sequence lies; without persistent tokens and without `before`.

        Raises:
          ValueError: persistent tokens, or tokens before each document, for full attention.
        """
        if axis is not None:
            return self._mix_shard(x, axis, mask, starts, cache)
        packing = None if mask is None else pack_tokens(mask)
        positions, documents = token_positions(
            starts,
            packing,
            shape=x.shape[:2],
            first=None if cache is None else cache.next_position,
            begin=0 if before is None else before.number,
        )
        # Packed, so that a window counts real tokens and a cache holds no padding.
        x = x if packing is None else pack(x, packing)
        query, key, value, gate = self.project(x, positions)
        in_front = None if persistent is None else self._persistent(persistent)
        if before is not None:
            in_front = self._in_window(before)
        if cache is None:
            output = whole_sequence_attention(
                *(query, key, value),
                positions=positions,
                window=self.config.window,
                backend=self.config.backend,
                persistent=in_front,
                documents=documents,
            )
        elif isinstance(cache, RingCache):
            new = {"positions": positions, "documents": documents}
            output = ring_attention(query, key, value, cache, **new)
            cache = put_in_ring(cache, key, value, after=output, **new)
        else:
            output, cache = attend_window(
                *(query, key, value, positions, cache),
                counts=None if packing is None else packing.counts,
                persistent=in_front,
                documents=documents,
                fresh=None if before is None else before.cache,
            )
        y = self.gated(output, gate)
        return y if packing is None else unpack(y, packing), cache

    def _mix_shard(
        self, x: jax.Array, axis: SequenceAxis, mask: Mask, starts: Starts, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """`mix` of this device's shard of each sequence."""
        first = None if cache is None else cache.next_position
        at = positions_of_part(starts, axis=axis, shape=x.shape[:2], first=first, mask=mask)
        query, key, value, gate = self.project(x, at.positions)
        options: dict[str, Any] = {"window": self.config.window, "cache": cache, "mask": mask}
        output, cache = attend_shard(query, key, value, at, axis=axis, **options)
        return self.gated(output, gate), cache

    def gated(
        self, attended: Float[Array, "batch length heads head"], gate: jax.Array | None
    ) -> Float[Array, "batch length model"]:
        """The layer's output from the heads'."""
        if gate is not None:
            # Before the map to the output, so that a head can leave a token out.
            attended = attended * jax.nn.sigmoid(gate)
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def mix_over_devices(
        self,
        x: Float[Array, "batch length model"],
        partition: Partition,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "batch length model"], Cache | None]:
        """`mix`, each device with its own sequences, its own shard of each, and its own heads.

        Keys and values of full attention travel around the devices; of a window, only the last
        ones of each shard are sent, to the next.
        """
        config, axis = self.config, partition.sequence
        for name, number in config.split_numbers.items():
            partition.check_divides(name, number, HEADS)
        tokens, by_head, in_cache = partition.tokens(), partition.tokens(HEADS), None
        first = None
        if cache is not None:
            # Keys and values lie with their heads, positions on every device.
            heads, rows, first = P(BATCH, None, HEADS), P(BATCH), cache.next_position
            in_cache = type(cache)(heads, heads, rows, rows)  # pyright: ignore[reportArgumentType]
        length = x.shape[1] // partition.size(SEQUENCE)

        def places(mask: Mask, starts: Starts, first: Any) -> Positions:
            shape = (x.shape[0] // partition.size(*BATCH), length)
            if axis is None:
                return Positions(*token_positions(starts, None, shape=shape, first=None))
            return positions_of_part(starts, axis=axis, shape=shape, first=first, mask=mask)

        def attend(query, key, value, at, cache, mask):
            if axis is None:
                output = whole_sequence_attention(
                    *(query, key, value),
                    positions=at.positions,
                    window=config.window,
                    backend=config.backend,
                    documents=at.numbers,
                )
                return output, None
            options: dict[str, Any] = {"window": config.window, "cache": cache, "mask": mask}
            return attend_shard(query, key, value, at, axis=axis, **options)

        # Positions once for all heads; the projections need them before heads are split.
        at = partition.run(places, in_specs=(tokens, tokens, P(BATCH)), out_specs=tokens)(
            mask, starts, first
        )
        query, key, value, gate = self.project(x, at.positions)
        output, cache = partition.run(
            attend,
            in_specs=(by_head, by_head, by_head, tokens, in_cache, tokens),
            out_specs=(by_head, in_cache),
        )(query, key, value, at, cache, mask)
        return self.gated(output, gate), cache

    def _persistent(self, tokens: jax.Array) -> Persistent:
        self._check_window()
        # They stand right before position 0, whatever the document.
        positions = jnp.arange(-tokens.shape[0], 0, dtype=jnp.int32)[None]
        projected = self.project(tokens[None], positions)
        return Persistent(projected.key[0], projected.value[0])

    def _in_window(self, before: ReadBefore) -> Persistent:
        """The last of the tokens before each document, as many as a window holds."""
        cache, capacity = before.cache, self._check_window()
        # The cache is filled from its end; entries before hold no token.
        last = slice(max(0, capacity - before.number), None)
        return Persistent(*(x[0, last] for x in (cache.keys, cache.values, cache.positions)))

    def _check_window(self) -> int:
        if self.config.window is None:
            raise ValueError(
                "window=None: persistent tokens go with a window; give the attention one."
            )
        return self.config.window

    def project(
        self, x: Float[Array, "batch length model"], positions: Int[Array, "batch length"]
    ) -> AttentionInputs:
        """Queries and keys, normalised and rotated, values and gates."""
        config = self.config
        shape = (*x.shape[:2], -1, config.head_dim)
        query, gate = self.q_proj(x), None
        if config.gated:
            # Each head's columns are its query, then its gate.
            query, gate = jnp.split(query.reshape(*x.shape[:2], config.num_heads, -1), 2, axis=-1)
        query = self._normed(self.q_norm, query.reshape(shape))
        key = self._normed(self.k_norm, self.k_proj(x).reshape(shape))
        if config.rotary_dim:
            rotary = rotary_frequencies(
                config.rotary_dim,
                theta=config.rope_theta,
                scaling=config.yarn or config.llama3 or config.linear_scaling,
            )
            query, key = (apply_rotary(y, positions, rotary=rotary) for y in (query, key))
        if config.score_dim is not None:
            # The scores' own factor is head_dim^-0.5; this makes it score_dim^-0.5.
            query = query * math.sqrt(config.head_dim / config.score_dim)
        return AttentionInputs(query, key, self.v_proj(x).reshape(shape), gate)

    def _normed(self, norm: RMSNorm | None, x: jax.Array) -> jax.Array:
        """Heads `[batch, length, heads, head]`, normed one by one or together."""
        if norm is None:
            return x
        # OLMo norms all heads together, Qwen each head alone.
        if self.config.qk_norm == "head":
            return norm(x)
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)
