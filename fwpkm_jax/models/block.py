"""One decoder layer: the order of its sub-layers."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.platform import platform
from fwpkm_jax.core.streams.pending import ChunkSize, Pending
from fwpkm_jax.core.streams.queue import clear
from fwpkm_jax.core.targets import Pairing, write_weights
from fwpkm_jax.layers.experts import Experts, RouterLoad
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightInfo
from fwpkm_jax.layers.mixers.base import AbstractMixer
from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.layers.pkm import PKM, QueryStatistics
from fwpkm_jax.models.config import Norms
from fwpkm_jax.models.remat import INPUT, MIXED, POLICIES, Remat
from fwpkm_jax.models.sharding import gathered


class BlockStream(NamedTuple):
    """The state of one layer between two pieces of a stream.

    Attributes:
      cache: the token mixer's cache.
      pending: the memory's queue of tokens that are not written yet; None without a memory.
      memory_cache: the cache of the memory's own mixer; None without one.
    """

    cache: Any
    pending: Pending | None
    memory_cache: Any = None


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """What every layer of a decoder gets in one call: the tokens' documents, how memories are
    written, and how the work is done.

    Only whole sequences use `pairing`, `remat` and `batch_statistics`; only pieces of a stream use
    `numbers` and `chunk_size`.
    """

    mask: TokenMask | None = None
    """1 for real tokens, 0 for padding, as the caller says. Token mixers skip this padding; to them
    padding of segment ids between documents is a document of its own."""
    real: TokenMask | None = None
    """`mask` with 0 also at the padding of segment ids; memories write, and statistics count, the
    tokens where it is 1."""
    starts: Bool[Array, "batch length"] | None = None
    """True at the first token of each document. None: a row is one document, or a piece continues
    the document before it."""
    numbers: Int[Array, "batch length"] | None = None
    """The number of each token's document, counted along the stream."""
    write: bool = True
    """False reads memories without writing to them, see `FastWeight.__call__`."""
    pairing: Pairing = write_weights
    """Makes the write weights, see `core.targets.write_weights`."""
    chunk_size: ChunkSize | None = None
    """Tokens per write; None: the config's."""
    partition: Partition | None = None
    """How devices share the work; None: one device."""
    remat: Remat | None = None
    """Which activations the backward pass recomputes."""
    batch_statistics: bool = False
    """See `PKM.__call__`."""


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
    memory: Memory | None = None
    info: FastWeightInfo | None = None
    pkm_slot_ids: Int[Array, "batch length places"] | None = None
    pkm_statistics: QueryStatistics | None = None
    router_load: RouterLoad | None = None


class Block(nnx.Module):
    """[fast-weight memory] -> token mixer -> MLP, PKM or experts, each on the residual stream.

    A memory may have a mixer of its own. It reads the normalised stream, and the memory reads the
    sum of stream and output, which goes nowhere else.

    Mixer and MLP read the normalised stream. With `norms="outputs"` they read the stream itself,
    and their outputs are normalised before they are added; with "both", inputs and outputs are.
    """

    def __init__(
        self,
        mixer: AbstractMixer,
        feed_forward: SwiGLU | PKM | Experts,
        memory: FastWeight | None,
        model_dim: int,
        *,
        path: str,
        norm_eps: float,
        memory_mixer: AbstractMixer | None = None,
        norm_offset: bool = True,
        norms: Norms = "inputs",
    ):
        """Args: `path` of the layer in its model, by which its weights' layout names them."""
        self.path = path
        self.memory = memory
        self.norms: Norms = norms

        def norm() -> RMSNorm:
            return RMSNorm(model_dim, eps=norm_eps, offset=norm_offset)

        self.memory_mixer_norm = None if memory_mixer is None else norm()
        self.memory_mixer = memory_mixer
        self.mixer_norm = norm()
        self.mixer = mixer
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward
        self.mixer_output_norm = norm() if norms == "both" else None
        self.feed_forward_output_norm = norm() if norms == "both" else None

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory | None,
        context: ForwardContext,
    ) -> BlockOutput:
        """Processes whole sequences from position 0.

        Args:
          x: the residual stream.
          memory: fast weights, leaves `[groups, ...]`; None without a memory.
          context: of the call.
        """
        layer, info = self.memory, None
        if layer is not None:
            if context.partition is not None:
                layer = gathered(context.partition, layer, f"{self.path}/memory")
            seen = x if self.memory_mixer is None else self._mixed(x, None, context)[0]
            y, memory, info = layer(
                seen,
                memory,
                mask=context.real,
                starts=context.starts,
                write=context.write,
                pairing=context.pairing,
                partition=context.partition,
            )
            x = x + y
        rest = functools.partial(self._mix_and_feed_forward, context=context)
        if context.remat is not None:
            rest = jax.checkpoint(rest, policy=POLICIES[context.remat])
        out, _ = rest(x)
        return out._replace(memory=memory, info=info)

    def stream(
        self,
        x: Float[Array, "batch length model"],
        memory: Memory | None,
        state: BlockStream,
        context: ForwardContext,
        *,
        initial: Memory | None = None,
    ) -> tuple[jax.Array, Memory | None, BlockStream, FastWeightInfo | None]:
        """Processes a piece of a stream, which continues from `state`.

        `initial` is what the memory of a document that starts begins with.

        Returns:
          The residual stream after the layer, the memory, the layer's new state, and what the
          memory did (None without a memory).
        """
        layer, info = self.memory, None
        pending, memory_cache = state.pending, state.memory_cache
        if layer is not None:
            assert pending is not None, "a stream of a memory layer carries its queue"
            if context.partition is not None:
                layer = gathered(context.partition, layer, f"{self.path}/memory")
            seen = x
            if self.memory_mixer is not None:
                seen, memory_cache = self._mixed(x, memory_cache, context)
            y, memory, pending, info = layer.stream(
                seen,
                memory,
                pending,
                mask=context.real,
                numbers=context.numbers,
                starts=context.starts,
                initial=initial,
                chunk_size=context.chunk_size,
                write=context.write,
                partition=context.partition,
            )
            x = x + y
        out, cache = self._mix_and_feed_forward(x, state.cache, context=context)
        return out.x, memory, BlockStream(cache, pending, memory_cache), info

    def init_stream(
        self, batch: int, groups: int, *, max_length: int, max_chunk_size: int, dtype: Any
    ) -> BlockStream:
        """The state at the start of a stream: an empty cache and an empty queue."""
        cache, memory_cache = (
            None if mixer is None else mixer.init_cache(batch, max_length=max_length, dtype=dtype)
            for mixer in (self.mixer, self.memory_mixer)
        )
        if self.memory is None:
            return BlockStream(cache, None)
        memory_dtype = jnp.promote_types(dtype, jnp.float32)
        pending = self.memory.init_pending(
            batch, groups, max_chunk_size=max_chunk_size, dtype=memory_dtype
        )
        return BlockStream(cache, pending, memory_cache)

    def reset_cache(self, state: BlockStream, *, pending: bool) -> BlockStream:
        """Empties the mixers' caches, and with `pending` also the queue; capacities stay."""
        state = state._replace(cache=self.mixer.reset_cache(state.cache))
        if self.memory_mixer is not None:
            state = state._replace(memory_cache=self.memory_mixer.reset_cache(state.memory_cache))
        if pending and state.pending is not None:
            return state._replace(pending=clear(state.pending))
        return state

    def _mixed(self, x: jax.Array, cache: Any, context: ForwardContext) -> tuple[jax.Array, Any]:
        """What a memory with a mixer of its own reads, and the mixer's cache."""
        mixer, partition = self.memory_mixer, context.partition
        assert mixer is not None
        assert self.memory_mixer_norm is not None
        if partition is not None:
            mixer = gathered(partition, mixer, f"{self.path}/memory_mixer")
        y, cache = mixer(
            self.memory_mixer_norm(x),
            mask=context.mask,
            starts=context.starts,
            cache=cache,
            partition=partition,
        )
        return x + y if partition is None else partition.by_sequence(x + y), cache

    def _mix_and_feed_forward(
        self, x: jax.Array, cache: Any = None, *, context: ForwardContext
    ) -> tuple[BlockOutput, Any]:
        """The layer's output after the memory, and the mixer's cache."""
        partition, mixer, feed_forward = context.partition, self.mixer, self.feed_forward
        if partition is not None:
            # Gathered here, so that `jax.checkpoint` does not keep the gathered copies.
            mixer = gathered(partition, mixer, f"{self.path}/mixer")
            feed_forward = gathered(partition, feed_forward, f"{self.path}/feed_forward")
        x = checkpoint_name(x, INPUT)
        # One GPU computes the norms of whole sequences in one pass with the sums, by a kernel.
        fused = partition is None and cache is None and platform() == "gpu"
        x, normed = self._sum_and_norm(self.mixer_norm, x, None, fused)
        mixed, cache = mixer(
            normed, mask=context.mask, starts=context.starts, cache=cache, partition=partition
        )
        mixed = checkpoint_name(mixed, MIXED)
        mixer_norm, feed_forward_norm = self.mixer_output_norm, self.feed_forward_output_norm
        if self.norms == "outputs":  # Then a sub-layer's only norm is that of its output.
            mixer_norm, feed_forward_norm = self.mixer_norm, self.feed_forward_norm
        mixed = mixed if mixer_norm is None else mixer_norm(mixed)
        if partition is not None:
            x, mixed = partition.by_sequence(x + mixed), None
        x, normed = self._sum_and_norm(self.feed_forward_norm, x, mixed, fused)
        facts: dict[str, Any] = {}
        if isinstance(feed_forward, PKM):
            out = feed_forward(
                normed,
                mask=context.real,
                partition=partition,
                batch_statistics=context.batch_statistics,
            )
            y, facts = out.output, {"pkm_slot_ids": out.slot_ids, "pkm_statistics": out.statistics}
        elif isinstance(feed_forward, Experts):
            y, facts["router_load"] = feed_forward(normed, partition=partition)
        else:
            y = feed_forward(normed)
        x = x + (y if feed_forward_norm is None else feed_forward_norm(y))
        x = x if partition is None else partition.by_sequence(x)
        return BlockOutput(x, **facts), cache

    def _sum_and_norm(
        self, norm: RMSNorm, x: jax.Array, branch: jax.Array | None, fused: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream with a branch added, and what the next sub-layer reads of it."""
        # With normed outputs the sub-layers read the stream itself.
        post_norm = self.norms == "outputs"
        if fused and not post_norm:
            return norm.after_sum(x, branch)
        x = x if branch is None else x + branch
        return x, x if post_norm else norm(x)
