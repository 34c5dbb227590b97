"""Titans with the memory as a context of attention.

References: Behrouz et al. 2025, arXiv:2501.00663, section 4.1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.attention.softmax import Persistent, in_front, masked_attention
from fwpkm_jax.core.documents import pack_starts
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.mixers.base import AbstractMixer, Mask, Starts
from fwpkm_jax.layers.mixers.titans import Titans, TitansCache
from fwpkm_jax.layers.mixers.titans_config import TitansConfig
from fwpkm_jax.layers.mixers.titans_pieces import in_pieces, real_tokens
from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm
from fwpkm_jax.layers.parameters import linear_map, parameter

Output = Float[Array, "batch length model"]


class TitansMACCache(NamedTuple):
    """What a stream carries: keys and values of each sequence's segment, and the memory.

    Attributes:
      keys: of the segment's tokens, `[batch, segment, kv_heads, head]`; entries behind them are of
        an earlier segment and not used.
      values: of the same shape.
      context_keys: of what each token read from the memory, of the same shape.
      context_values: of the same shape.
      memory: the cache of the memory, with the position in the stream.
    """

    keys: Float[Array, "batch segment kv_heads head"]
    values: Float[Array, "batch segment kv_heads head"]
    context_keys: Float[Array, "batch segment kv_heads head"]
    context_values: Float[Array, "batch segment kv_heads head"]
    memory: TitansCache


class TitansMAC(AbstractMixer):
    """Memory as a context: attention within segments that are chunks of the memory.

    A token attends to the persistent tokens, to the tokens of its segment up to itself, and to what
    these tokens read from the memory as it was before the segment. The memory learns from the
    output of attention. What it then reads for the same tokens gates the output.

    In the published formulas the first tokens of a segment see what was read for its last tokens,
    and their gate comes from a memory that has seen the whole segment. A decoder must be causal, so
    here both are.
    """

    def __init__(
        self, config: TitansConfig, attention: AttentionConfig, model_dim: int, **shared: Any
    ):
        """Args: `shared` as of `Attention`; the attention's window is not used.

        Raises:
          ValueError: the memory has no chunks.
        """
        if config.chunk_size is None:
            raise ValueError("chunk_size=None is no segment; give it a number of tokens.")
        self.segment = config.chunk_size
        self.memory = Titans(config, model_dim, **shared)
        self.context_norm = RMSNorm(model_dim, eps=shared.get("norm_eps", 1e-5))
        attention = dataclasses.replace(attention, window=None)
        self.attention = Attention(attention, model_dim, **shared)
        self.gate = TitansGate(model_dim, **shared)
        shape = (config.num_persistent, model_dim)
        tokens = nnx.initializers.normal(1.0)(shared["rngs"].params(), shape, jnp.float32)
        self.tokens = (
            parameter(tokens, "embedding", (None, "embed")) if config.num_persistent else None
        )

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> TitansMACCache:
        config = self.attention.config
        shape = (batch, self.segment, config.num_kv_heads, config.head_dim)
        memory = self.memory.init_cache(batch, max_length=max_length, dtype=dtype)
        return TitansMACCache._make([*(jnp.zeros(shape, dtype) for _ in range(4)), memory])

    @property
    def output_map(self) -> nnx.Linear:
        return self.gate.out_proj

    def mix(
        self,
        x: Output,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: TitansMACCache | None = None,
    ) -> tuple[Output, TitansMACCache | None]:
        # Segments count real tokens, so padding goes behind them.
        packing = None if mask is None else pack_tokens(mask)
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)
        y, cache = in_pieces(
            *(self._advance, x, cache),
            lambda: self.init_cache(x.shape[0], max_length=x.shape[1], dtype=x.dtype),
            count=real_tokens(x, packing),
            starts=starts,
            chunk=self.segment,
            position=None if cache is None else cache.memory.position,
        )
        return unpack(y, packing), cache

    def _advance(
        self, cache: TitansMACCache, x: Float[Array, "batch 1 length model"], count: jax.Array
    ) -> tuple[TitansMACCache, Float[Array, "batch 1 length model"]]:
        """Tokens of one segment, each sequence's first `count` ones real."""
        x = x[:, 0]
        batch, length, _ = x.shape
        real = jnp.arange(length, dtype=jnp.int32)[None] < count[:, None]
        first = 0 if self.tokens is None else self.tokens.shape[0]
        place = (cache.memory.position % self.segment)[:, None]
        place = place + jnp.arange(length, dtype=jnp.int32)[None]
        # In the order of the paper: persistent tokens, context, segment.
        context = self.context_norm(self.memory.recall(x, cache.memory.base))
        # The context stands before the segment, its tokens in the same order.
        context = self.attention.project(context, first + place)
        own = self.attention.project(x, first + self.segment + place)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        # A place behind the segment is dropped, so that padding is not stored.
        at = jnp.where(real, place, self.segment)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[rows, at].set(new.astype(old.dtype), mode="drop")

        fresh = (own.key, own.value, context.key, context.value)
        stored = [put(old, new) for old, new in zip(cache[:4], fresh, strict=True)]
        # Keys of an earlier segment have later places than every real token, so no token sees them.
        places = jnp.arange(self.segment, dtype=jnp.int32)
        places = jnp.broadcast_to(jnp.concatenate([places, places]), (batch, 2 * self.segment))
        keys = jnp.concatenate([stored[2], stored[0]], axis=1).astype(own.key.dtype)
        values = jnp.concatenate([stored[3], stored[1]], axis=1).astype(own.value.dtype)
        keys, values, places = in_front(self._persistent(x.dtype), keys, values, places)
        attended = masked_attention(
            own.query,
            keys,
            values,
            query_positions=jnp.where(real, place, -1),
            key_positions=places,
            window=None,
            num_persistent=first,
        )
        y = self.attention.gated(attended, own.gate)
        # It learns from what attention made of the tokens, not from the tokens.
        memory, remembered = self.memory.advance(cache.memory, y[:, None], count)
        y = self.gate(y, remembered[:, 0])
        return TitansMACCache._make([*stored, memory]), y[:, None]

    def _persistent(self, dtype: DTypeLike) -> Persistent | None:
        if self.tokens is None:
            return None
        tokens = self.tokens[...].astype(dtype)[None]
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        projected = self.attention.project(tokens, places)
        return Persistent(projected.key[0], projected.value[0])


class TitansGate(nnx.Module):
    """A projection of attention's output times SiLU of the memory's output, both normed."""

    def __init__(self, model_dim: int, *, norm_eps=1e-5, init_std=0.02, dtype=None, rngs):
        self.norm = GatedRMSNorm(model_dim, eps=norm_eps, dtype=dtype)
        self.memory_norm = RMSNorm(model_dim, eps=norm_eps)
        options = {"init_std": init_std, "dtype": dtype, "rngs": rngs}
        self.out_proj = linear_map(model_dim, model_dim, "heads", "embed", **options)

    def __call__(self, attended: jax.Array, remembered: jax.Array) -> jax.Array:
        return self.out_proj(self.norm(attended, self.memory_norm(remembered)))
