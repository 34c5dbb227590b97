"""One decoder layer: the order of its sub-layers."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.documents import Documents
from fwpkm_jax.core.streams.queue import ChunkSize, Pending, clear
from fwpkm_jax.core.targets import Pairing, write_weights
from fwpkm_jax.layers.experts import Experts, RouterLoad
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightInfo
from fwpkm_jax.layers.mixers.base import AbstractMixer
from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.layers.pkm import PKM, QueryStatistics
from fwpkm_jax.models.sharding import gathered

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
    """What one layer makes of whole sequences; what it has no such part for is None.

    Attributes:
      x: the residual stream.
      memory: fast weights after the last write.
      info: what the fast-weight memory did.
      pkm_slot_ids: slots that the product-key memory read.
      pkm_statistics: of its queries, where they were normed by those of this batch.
      router_load: how the experts' router spread the tokens.
    """

    x: Float[Array, "batch length model"]
    memory: Memory | None
    info: FastWeightInfo | None
    pkm_slot_ids: Int[Array, "batch length places"] | None
    pkm_statistics: QueryStatistics | None
    router_load: RouterLoad | None


class Block(nnx.Module):
    """[fast-weight memory] -> token mixer -> MLP, PKM or experts, each on the residual stream.

    Mixer and MLP read a norm of the stream; with `post_norm` they read the stream, and what they
    add is normed instead.
    """

    def __init__(
        self,
        mixer: AbstractMixer,
        feed_forward: SwiGLU | PKM | Experts,
        memory: FastWeight | None,
        model_dim: int,
        *,
        norm_eps: float,
        norm_offset: bool = True,
        post_norm: bool = False,
    ):
        self.memory = memory
        self.post_norm = post_norm
        self.mixer_norm = RMSNorm(model_dim, eps=norm_eps, offset=norm_offset)
        self.mixer = mixer
        self.feed_forward_norm = RMSNorm(model_dim, eps=norm_eps, offset=norm_offset)
        self.feed_forward = feed_forward

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory | None,
        *,
        mask: Float[Array, "batch length"] | None = None,
        documents: Documents | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        remat: Remat | None = None,
        partition: Partition | None = None,
        name: str = "",
        batch_statistics: bool = False,
    ) -> BlockOutput:
        """Whole sequences from position 0; see `FastWeight.__call__` for the memory.

        `name` is the layer's path in the model, by which `partition` finds its weights' layout; for
        `batch_statistics` see `PKM.__call__`. Of rows with `documents`, token mixers take padding
        for a document that no other sees, so that only memories and statistics need to skip it.
        """
        info = None
        if self.memory is not None:
            layer = gathered(partition, self.memory, f"{name}/memory")
            y, memory, info = layer(
                x,
                memory,
                mask=mask if documents is None else documents.mask(mask),
                starts=None if documents is None else documents.starts,
                write=write,
                pairing=pairing,
                partition=partition,
            )
            x = x + y
        rest = functools.partial(
            self._mix_and_feed_forward,
            partition=partition,
            name=name,
            batch_statistics=batch_statistics,
        )
        x, facts = (rest if remat is None else jax.checkpoint(rest))(x, mask, documents)
        return BlockOutput(x, memory, info, facts.slot_ids, facts.statistics, facts.router_load)

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
            y, memory, pending, info = self.memory.stream(
                x, memory, pending, mask=mask, chunk_size=chunk_size, write=write
            )
            x = x + y
        x, cache = self._mix(self.mixer, x, mask=mask, cache=state.cache)
        x, _ = self._feed_forward(x)
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
        cache = self.mixer.reset_cache(state.cache)
        if pending and state.pending is not None:
            return BlockStream(cache, clear(state.pending))
        return BlockStream(cache, state.pending)

    def _mix_and_feed_forward(
        self,
        x: jax.Array,
        mask: jax.Array | None,
        documents: Documents | None,
        *,
        partition: Partition | None,
        name: str,
        batch_statistics: bool,
    ) -> tuple[jax.Array, "_FeedForwardFacts"]:
        # Weights are gathered here, so that a checkpoint does not keep them gathered.
        mixer = gathered(partition, self.mixer, f"{name}/mixer")
        starts = None if documents is None else documents.starts
        x, _ = self._mix(mixer, x, mask=mask, starts=starts, partition=partition)
        if partition is not None:
            x = partition.by_sequence(x)
        counted = mask if documents is None else documents.mask(mask)
        x, facts = self._feed_forward(x, partition, name, batch_statistics, counted)
        return x if partition is None else partition.by_sequence(x), facts

    def _mix(self, mixer: AbstractMixer, x: jax.Array, **arguments: Any) -> tuple[jax.Array, Any]:
        """The residual stream after the mixer, and the mixer's cache."""
        mixed, cache = mixer(x if self.post_norm else self.mixer_norm(x), **arguments)
        return x + (self.mixer_norm(mixed) if self.post_norm else mixed), cache

    def _feed_forward(
        self,
        x: jax.Array,
        partition: Partition | None = None,
        name: str = "",
        batch_statistics: bool = False,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, "_FeedForwardFacts"]:
        normed = x if self.post_norm else self.feed_forward_norm(x)
        feed_forward = gathered(partition, self.feed_forward, f"{name}/feed_forward")
        if isinstance(feed_forward, PKM):
            out = feed_forward(
                normed, mask=mask, partition=partition, batch_statistics=batch_statistics
            )
            y, facts = out.output, _FeedForwardFacts(out.slot_ids, out.statistics, None)
        elif isinstance(feed_forward, Experts):
            y, load = feed_forward(normed, partition=partition)
            facts = _FeedForwardFacts(None, None, load)
        else:
            y, facts = feed_forward(normed), _FeedForwardFacts(None, None, None)
        return x + (self.feed_forward_norm(y) if self.post_norm else y), facts


class _FeedForwardFacts(NamedTuple):
    """Of `BlockOutput`, what the MLP, PKM or experts report."""

    slot_ids: jax.Array | None
    statistics: QueryStatistics | None
    router_load: RouterLoad | None
