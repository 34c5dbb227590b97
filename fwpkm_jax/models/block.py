"""One decoder layer: the order of its sub-layers."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunking import Memory
from fwpkm_jax.core.holding import ChunkSize
from fwpkm_jax.core.streaming import Pending, clear
from fwpkm_jax.core.targets import Pairing, write_weights
from fwpkm_jax.layers.attention import Attention
from fwpkm_jax.layers.fast_weight import FastWeight, FastWeightInfo
from fwpkm_jax.layers.gated_delta_net import GatedDeltaNet
from fwpkm_jax.layers.lact import LaCT
from fwpkm_jax.layers.matrix_memory import MatrixMemory
from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.pkm import PKM

Mixer = Attention | GatedDeltaNet | LaCT | MatrixMemory

Remat = Literal["block"]
"""What a backward pass computes again instead of keeping it from the forward pass: of every layer
the token mixer and the MLP or PKM. Never the memory: to write it again, its table from before would
have to be kept."""


class BlockStream(NamedTuple):
    """What one layer carries along a stream.

    Attributes:
      cache: of the token mixer.
      pending: the memory's waiting tokens, or None without a memory.
    """

    cache: Any
    pending: Pending | None


class BlockOutput(NamedTuple):
    """What one layer makes of whole sequences; the last three are None where it has no such part.

    Attributes:
      x: the residual stream.
      memory: fast weights after the last write.
      info: what the fast-weight memory did.
      pkm_slot_ids: slots that the product-key memory read.
    """

    x: Float[Array, "batch length model"]
    memory: Memory | None
    info: FastWeightInfo | None
    pkm_slot_ids: Int[Array, "batch length places"] | None


class Block(nnx.Module):
    """[fast-weight memory] -> token mixer -> MLP or PKM, each on the residual stream."""

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: SwiGLU | PKM,
        memory: FastWeight | None,
        model_dim: int,
        *,
        norm_eps: float,
    ):
        self.memory = memory
        self.mixer_norm = RMSNorm(model_dim, eps=norm_eps)
        self.mixer = mixer
        self.feed_forward_norm = RMSNorm(model_dim, eps=norm_eps)
        self.feed_forward = feed_forward

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory | None,
        *,
        mask: Float[Array, "batch length"] | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        remat: Remat | None = None,
    ) -> BlockOutput:
        """Whole sequences from position 0; see `FastWeight.__call__` for the memory."""
        info = None
        if self.memory is not None:
            x, memory, info = self.memory(x, memory, mask=mask, write=write, pairing=pairing)
        rest = self._mix_and_feed_forward
        x, pkm_slot_ids = (rest if remat is None else jax.checkpoint(rest))(x, mask)
        return BlockOutput(x, memory, info, pkm_slot_ids)

    def stream(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory | None,
        state: BlockStream,
        *,
        mask: Float[Array, "batch length"] | None = None,
        chunk_size: ChunkSize | None = None,
        write: bool = True,
    ) -> tuple[jax.Array, Memory | None, BlockStream, FastWeightInfo | None]:
        """A piece of a stream, continuing `state`."""
        info, pending = None, state.pending
        if self.memory is not None:
            assert pending is not None, "a stream of a memory layer carries its queue"
            x, memory, pending, info = self.memory.stream(
                x, memory, pending, mask=mask, chunk_size=chunk_size, write=write
            )
        mixed, cache = self.mixer(self.mixer_norm(x), mask=mask, cache=state.cache)
        x, _ = self._feed_forward(x + mixed)
        return x, memory, BlockStream(cache, pending), info

    def init_stream(
        self, batch: int, groups: int, *, max_length: int, max_chunk_size: int, dtype: Any
    ) -> BlockStream:
        """Empty caches and queue."""
        cache = self.mixer.init_cache(batch, max_length=max_length, dtype=dtype)
        if self.memory is None:
            return BlockStream(cache, None)
        memory_dtype = jnp.promote_types(dtype, jnp.float32)
        pending = self.memory.init_pending(
            batch, groups, max_chunk_size=max_chunk_size, dtype=memory_dtype
        )
        return BlockStream(cache, pending)

    def reset_cache(self, state: BlockStream, *, pending: bool) -> BlockStream:
        """The state with an empty mixer cache of the same capacity, and maybe an empty queue."""
        leaf = jax.tree.leaves(state.cache)[0]  # [batch, capacity, ...] in every cache.
        cache = self.mixer.init_cache(leaf.shape[0], max_length=leaf.shape[1], dtype=leaf.dtype)
        if pending and state.pending is not None:
            return BlockStream(cache, clear(state.pending))
        return BlockStream(cache, state.pending)

    def _mix_and_feed_forward(
        self, x: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        mixed, _ = self.mixer(self.mixer_norm(x), mask=mask)
        return self._feed_forward(x + mixed)

    def _feed_forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        normed = self.feed_forward_norm(x)
        if isinstance(self.feed_forward, PKM):
            out, slot_ids = self.feed_forward(normed)
            return x + out, slot_ids
        return x + self.feed_forward(normed), None
