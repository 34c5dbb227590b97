"""One decoder layer: the order of its sub-layers."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
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
"""Which activations the backward pass recomputes instead of keeping them. block: those of every
layer's token mixer and MLP, PKM or experts. The fast-weight memory is never recomputed, because
that would need a copy of its table from before the write."""


class BlockStream(NamedTuple):
    """The state of one layer between two pieces of a stream.

    Attributes:
      cache: the token mixer's cache.
      pending: the memory's queue of tokens that are not written yet; None without a memory.
    """

    cache: Any
    pending: Pending | None


class BlockOutput(NamedTuple):
    """One layer's results for whole sequences; None for parts that the layer does not have.

    Attributes:
      x: the residual stream after the layer.
      memory: fast weights after the last write.
      info: gate, losses and metrics of the fast-weight memory.
      pkm_slot_ids: slots that the product-key memory read.
      pkm_statistics: this batch's statistics of the product-key memory's queries, if it has a
        batch norm and the call asks for `batch_statistics`.
      router_load: how the experts' router distributed the tokens.
    """

    x: Float[Array, "batch length model"]
    memory: Memory | None
    info: FastWeightInfo | None
    pkm_slot_ids: Int[Array, "batch length places"] | None
    pkm_statistics: QueryStatistics | None
    router_load: RouterLoad | None


class Block(nnx.Module):
    """[fast-weight memory] -> token mixer -> MLP, PKM or experts, each on the residual stream.

    Mixer and MLP read the normalised stream. With `post_norm` they read the stream itself, and
    their outputs are normalised before they are added.
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
        mask: TokenMask | None = None,
        documents: Documents | None = None,
        write: bool = True,
        pairing: Pairing = write_weights,
        remat: Remat | None = None,
        partition: Partition | None = None,
        name: str = "",
        batch_statistics: bool = False,
    ) -> BlockOutput:
        """Processes whole sequences from position 0.

        Args:
          x: the residual stream.
          memory: fast weights, leaves `[groups, ...]`; None without a memory.
          mask: 1 for real tokens, 0 for padding.
          documents: documents of each row; None: a row is one document. Token mixers treat padding
            as a separate document, so only memories and statistics must skip it.
          write: False reads without writing, see `FastWeight.__call__`.
          pairing: makes the write weights, see `core.targets.write_weights`.
          remat: which activations the backward pass recomputes.
          partition: of the work over devices; None: one device.
          name: the layer's path in the model; `partition` finds its weights' layout by it.
          batch_statistics: see `PKM.__call__`.
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
        mask: TokenMask | None = None,
        starts: Bool[Array, "batch length"] | None = None,
        numbers: Int[Array, "batch length"] | None = None,
        initial: Memory | None = None,
        chunk_size: ChunkSize | None = None,
        write: bool = True,
        partition: Partition | None = None,
        name: str = "",
    ) -> tuple[jax.Array, Memory | None, BlockStream, FastWeightInfo | None]:
        """Processes a piece of a stream, which continues from `state`.

        `starts` says where documents start; `numbers` tells them apart, for the memory; `initial`
        is what they start from; `partition` and `name` are as in `__call__`.

        Returns:
          The residual stream after the layer, the memory, the layer's new state, and what the
          memory did (None without a memory).
        """
        info, pending = None, state.pending
        if self.memory is not None:
            assert pending is not None, "a stream of a memory layer carries its queue"
            y, memory, pending, info = gathered(partition, self.memory, f"{name}/memory").stream(
                x,
                memory,
                pending,
                mask=mask,
                numbers=numbers,
                starts=starts,
                initial=initial,
                chunk_size=chunk_size,
                write=write,
                partition=partition,
            )
            x = x + y
        mixer = gathered(partition, self.mixer, f"{name}/mixer")
        x, mixed, cache = self._mix(
            mixer, x, mask=mask, starts=starts, cache=state.cache, partition=partition
        )
        x, _ = self._feed_forward(x + mixed, None, partition, name)
        x = x if partition is None else partition.by_sequence(x)
        return x, memory, BlockStream(cache, pending), info

    def init_stream(
        self, batch: int, groups: int, *, max_length: int, max_chunk_size: int, dtype: Any
    ) -> BlockStream:
        """The state at the start of a stream: an empty cache and an empty queue."""
        cache = self.mixer.init_cache(batch, max_length=max_length, dtype=dtype)
        if self.memory is None:
            return BlockStream(cache, None)
        memory_dtype = jnp.promote_types(dtype, jnp.float32)
        pending = self.memory.init_pending(
            batch, groups, max_chunk_size=max_chunk_size, dtype=memory_dtype
        )
        return BlockStream(cache, pending)

    def reset_cache(self, state: BlockStream, *, pending: bool) -> BlockStream:
        """Empties the mixer's cache, and with `pending` also the queue; capacities stay."""
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
        # Weights are gathered here, so that `jax.checkpoint` does not keep the gathered copies.
        mixer = gathered(partition, self.mixer, f"{name}/mixer")
        starts = None if documents is None else documents.starts
        x, mixed, _ = self._mix(
            mixer, x, whole=partition is None, mask=mask, starts=starts, partition=partition
        )
        if partition is not None:
            x, mixed = partition.by_sequence(x + mixed), None
        counted = mask if documents is None else documents.mask(mask)
        x, facts = self._feed_forward(
            x, mixed, partition, name, batch_statistics, counted, whole=partition is None
        )
        return x if partition is None else partition.by_sequence(x), facts

    def _mix(
        self, mixer: AbstractMixer, x: jax.Array, *, whole: bool = False, **arguments: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The residual stream, what the mixer adds to it, and the mixer's cache.

        `whole` says that one device holds whole sequences, whose norms a kernel may compute.
        """
        x, normed = self._normed(self.mixer_norm, x, None, whole)
        mixed, cache = mixer(normed, **arguments)
        return x, self.mixer_norm(mixed) if self.post_norm else mixed, cache

    def _normed(
        self, norm: RMSNorm, x: jax.Array, branch: jax.Array | None, whole: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream with a branch added, and what the next sub-layer reads of it."""
        if whole and not self.post_norm:
            return norm.after_sum(x, branch)
        x = x if branch is None else x + branch
        return x, x if self.post_norm else norm(x)

    def _feed_forward(
        self,
        x: jax.Array,
        mixed: jax.Array | None,
        partition: Partition | None = None,
        name: str = "",
        batch_statistics: bool = False,
        mask: jax.Array | None = None,
        whole: bool = False,
    ) -> tuple[jax.Array, "_FeedForwardFacts"]:
        x, normed = self._normed(self.feed_forward_norm, x, mixed, whole)
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
    """The fields of `BlockOutput` that come from the MLP, PKM or experts."""

    slot_ids: jax.Array | None
    statistics: QueryStatistics | None
    router_load: RouterLoad | None
