"""Titans' neural memory as a layer: a network per sequence and head that learns as it reads."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.documents import pack_starts
from fwpkm_jax.core.numerics import compute_dtype, rms_normalize
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.recurrence.decay_starts import bias_initializer, sigmoid_bias
from fwpkm_jax.core.streams.cuts import in_chunks, select
from fwpkm_jax.core.streams.pending import Pending, init_pending
from fwpkm_jax.core.streams.queue import append, drop
from fwpkm_jax.layers.mixers.base import AbstractMixer, Mask, ReadBefore, Starts
from fwpkm_jax.layers.mixers.titans_config import TitansConfig
from fwpkm_jax.layers.mixers.titans_pieces import in_pieces, real_tokens
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.layers.parameters import linear_map, parameter
from fwpkm_jax.rules.titans import TitansMemory, TitansNetwork, TitansWrites, scale_steps

_PIECE = 64  # Tokens of a stream read at once where no chunk ends.


class TitansCache(NamedTuple):
    """What a stream carries.

    Attributes:
      waiting: a queue per sequence: the inputs of the tokens that no write has taken yet.
      position: tokens read so far, `[batch]`.
      base: weights that gradients are taken at, leaves `[batch, heads, ...]`.
      memory: weights in use, and momentum, leaves `[batch, heads, ...]`.
    """

    waiting: Pending
    position: Int[Array, " batch"]
    base: TitansNetwork
    memory: TitansMemory


class Titans(AbstractMixer):
    """Reads a network that each sequence trains on its own keys and values, chunk by chunk.

    Every sequence starts with the same learned weights. Keys, values and each token's step size are
    projections of the normed input, as are the momentum and the share that each write forgets.
    Queries are projections of a second norm of the input. Several heads are gated and mixed by a
    projection.

    References: Behrouz et al. 2025, arXiv:2501.00663.
    """

    def __init__(
        self,
        config: TitansConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Args: `dtype` of activations, None for the input's; parameters are float32.

        Raises:
          ValueError: one head is not as wide as the model.
        """
        heads, head = config.num_heads, config.head_dim
        if heads == 1 and head != model_dim:
            raise ValueError(
                f"head_dim={head} of a single head must be the model's width, {model_dim}."
            )
        # Not split along heads: every device computes all heads of its sequences.
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)
        self.config, self.rule, self.norm_eps = config, config.rule(), norm_eps
        self.store_norm = RMSNorm(model_dim, eps=norm_eps)
        self.retrieve_norm = RMSNorm(model_dim, eps=norm_eps)
        self.query_proj = linear(model_dim, heads * head)
        self.key_proj = linear(model_dim, heads * head)
        self.value_proj = linear(model_dim, heads * head)
        self.rate_proj = linear(model_dim, heads, use_bias=True)
        # At first each write forgets a hundredth of the weights, or the share that the head drew.
        forget_bias = bias_initializer(config.decay_start, -4.6, lambda step: -sigmoid_bias(step))
        self.forget_proj = (
            linear(model_dim, heads, use_bias=True, bias_init=forget_bias)
            if config.forgetting
            else None
        )
        orders = config.momentum_order
        self.momentum_proj = linear(model_dim, heads * orders, use_bias=True) if orders else None
        self.combine_proj = (
            linear(model_dim, heads * orders, use_bias=True) if config.combine_momenta else None
        )
        start = jax.vmap(self.rule.init)(jax.random.split(rngs.params(), heads)).weights
        # The memory's initial weights are learned; what is written to them is not a parameter.
        self.layers = nnx.List([parameter(x, "matrix") for x in start.layers])
        self.scale = None if start.scale is None else parameter(start.scale, "norm_scale")
        biases = start.biases
        self.biases = None if biases is None else nnx.List([parameter(x, "bias") for x in biases])
        norm_bias = start.norm_bias
        self.norm_bias = None if norm_bias is None else parameter(norm_bias, "bias")
        # Added to 1 / i, the factor on the sum of a chunk's first i steps.
        writes = (config.chunk_size or 0) // config.write_size
        factor = jnp.zeros((writes,), jnp.float32) if config.average_steps else None
        self.step_factor = None if factor is None else parameter(factor, "gate")
        tensors = config.num_tensors
        self.tensor_rate_proj = (
            linear(model_dim, heads * tensors, use_bias=True) if config.tensor_rates else None
        )
        self.pool_proj = linear(model_dim, model_dim) if config.pooling == "attention" else None

        def head_norm(wanted: bool) -> nnx.Param | None:
            zeros = jnp.zeros((heads, head), jnp.float32)  # Own ones: parameters share no buffer.
            return parameter(zeros, "norm_scale") if wanted else None

        self.query_norm, self.key_norm = head_norm(config.qk_norm), head_norm(config.qk_norm)
        self.output_norm = head_norm(config.output_norm)
        self.gate_proj = linear(model_dim, heads) if heads > 1 else None
        self.out_proj = linear(heads * head, model_dim, "heads", "embed") if heads > 1 else None

    def initial_memory(self, batch: int, dtype: DTypeLike) -> TitansMemory:
        """The learned weights for every sequence, leaves `[batch, heads, ...]`."""
        dtype = compute_dtype(dtype)
        scale = None if self.scale is None else self.scale[...].astype(dtype)
        layers = tuple(x[...].astype(dtype) for x in self.layers)
        biases = self.biases
        if biases is not None:
            biases = tuple(x[...].astype(dtype) for x in biases)
        norm_bias = None if self.norm_bias is None else self.norm_bias[...].astype(dtype)
        # Every sequence begins with its own copy, which its writes then change.
        memory = jax.vmap(self.rule.start)(TitansNetwork(scale, layers, biases, norm_bias))
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), memory)

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> TitansCache:
        memory = self.initial_memory(batch, dtype)
        width = self.query_proj.in_features
        return TitansCache(
            waiting=init_pending(jnp.zeros((batch, 1, 1, width), dtype), self.config.write_size),
            position=jnp.zeros((batch,), jnp.int32),
            base=jax.tree.map(jnp.copy, memory.weights),  # No buffer may be donated twice.
            memory=memory,
        )

    @property
    def output_map(self) -> nnx.Linear | None:
        return self.out_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: TitansCache | None = None,
        before: ReadBefore | None = None,
    ) -> tuple[Float[Array, "batch length model"], TitansCache | None]:
        """Writes and chunks count each sequence's real tokens from its first.

        With `starts` and `before` they count from the first token that was read before each
        document.
        """
        packing = None if mask is None else pack_tokens(mask)
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)
        count = real_tokens(x, packing)
        if starts is None and cache is None:
            y, _ = self.whole(x, count)
            return unpack(y, packing), None

        def fresh() -> TitansCache:
            if before is not None:
                return before.cache
            return self.init_cache(x.shape[0], max_length=x.shape[1], dtype=x.dtype)

        y, cache = in_pieces(
            *(self.advance, x, cache, fresh),
            count=count,
            starts=starts,
            chunk=self.config.chunk_size or max(_PIECE, self.config.write_size),
            position=None if cache is None else cache.position,
            read=0 if before is None else before.number,
        )
        return unpack(y, packing), cache

    def whole(
        self, x: Float[Array, "batch length model"], count: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch length model"], TitansMemory]:
        """The outputs of whole sequences from their first token, and the memories after them."""
        size = self.config.write_size

        @jax.checkpoint
        def read_and_write(memory: TitansMemory, x: jax.Array, count: jax.Array):
            x = x[:, 0]
            # Tokens behind the last complete write only read.
            complete = x.shape[1] // size * size
            writes = self._writes(x[:, :complete], count)
            base, none = memory.weights, jnp.zeros_like(count)
            read, memory = self._advance(base, memory, writes, self.queries(x), none)
            done = jnp.clip(count, 0, x.shape[1]) // size
            return self._with_factors(base, memory, done), read[:, None]

        memory, read = in_chunks(
            read_and_write,
            self.initial_memory(x.shape[0], x.dtype),
            x[:, None],
            count=count,
            chunk=self.config.chunk_size or x.shape[1],
        )
        return self.merge(x, read[:, 0]), memory

    def advance(
        self,
        cache: TitansCache,
        x: Float[Array, "batch 1 length model"],
        count: Int[Array, " batch"],
    ) -> tuple[TitansCache, Float[Array, "batch 1 length model"]]:
        """A piece of a stream, all of one chunk: `within` of `core.streams.cuts.in_chunks`.

        Tokens wait in the queue until their write is complete. `queue.push` reads a token before
        the write that it completes; here it is read after that write, by the weights that the
        write leaves, so that reads and all writes of the piece are one computation.
        """
        size, chunk, length = self.config.write_size, self.config.chunk_size, x.shape[2]
        waiting = cache.waiting.num_waiting
        # Room for waiting and new tokens, rounded up to complete writes.
        room = (length + 2 * (size - 1)) // size * size
        queue = append(cache.waiting, x, count, capacity=room)
        joined, total = queue.tokens[:, 0], queue.num_waiting
        writes = self._writes(joined, total)
        done = (cache.position - (0 if chunk is None else cache.position // chunk * chunk)) // size
        read, memory = self._advance(cache.base, cache.memory, writes, self.queries(joined), done)
        own = waiting[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        # Reads of waiting tokens were given out before; only the new ones count.
        read = jnp.take_along_axis(read, own[:, :, None, None], axis=1)

        position = cache.position + count
        base = cache.base
        if chunk is not None:
            ends = position % chunk == 0
            if self.step_factor is not None:
                # Within a chunk the cache keeps the sum of its steps.
                whole = self._with_factors(base, memory, jnp.full_like(position, chunk // size))
                memory = memory._replace(weights=select(ends, whole.weights, memory.weights))
            base = select(ends, memory.weights, base)
        # Complete writes leave the queue; the rest waits for tokens to come.
        left = drop(queue, total // size * size, size)
        return TitansCache(left, position, base, memory), self.merge(x[:, 0], read)[:, None]

    def recall(
        self, x: Float[Array, "batch length model"], weights: TitansNetwork
    ) -> Float[Array, "batch length model"]:
        """Reads for the tokens `x` from given weights, leaves `[batch, heads, ...]`."""
        read = jax.vmap(jax.vmap(self.rule.apply))(weights, self.queries(x))
        return self.merge(x, jnp.moveaxis(read, 1, 2))

    def _advance(
        self,
        base: TitansNetwork,
        memory: TitansMemory,
        writes: TitansWrites,
        query: jax.Array,
        done: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch length heads head"], TitansMemory]:
        """Writes, and reads each query after the writes before it; for all sequences and heads.

        `done` says how many writes of the chunk are in `memory` already. With `average_steps` the
        returned memory has the sum of the chunk's steps.
        """

        def of_head(base, memory, writes, query, factors):
            weights, momentum, _ = self.rule.write(base, memory, writes)
            last = jax.tree.map(lambda x: x[-1], weights)
            if factors is not None:
                weights = scale_steps(base, weights, factors)
            return self.rule.read(weights, query), TitansMemory(last, momentum)

        number = writes.real.shape[-1] + 1
        factors = self._factors(done[:, None] + jnp.arange(number, dtype=jnp.int32)[None])
        of_heads = jax.vmap(of_head, in_axes=(0, 0, 0, 0, None))
        read, memory = jax.vmap(of_heads)(base, memory, writes, query, factors)
        return jnp.moveaxis(read, 1, 2), memory

    def _factors(self, done: Int[Array, "*dims"]) -> Float[Array, "*dims"] | None:
        """The factor on the sum of a chunk's first `done` steps; None: 1."""
        if self.step_factor is None:
            return None
        learned = self.step_factor[...]
        # A learned number is added to 1 / i, the mean of the steps; never below 0.
        inverse = 1.0 / jnp.arange(1, learned.size + 1, dtype=learned.dtype)
        factors = jnp.maximum(inverse + learned, 0.0)
        return factors[jnp.clip(done - 1, 0, learned.size - 1)]

    def _with_factors(
        self, base: TitansNetwork, memory: TitansMemory, done: Int[Array, " batch"]
    ) -> TitansMemory:
        """The memory with the sum of a chunk's first `done` steps scaled."""
        factors = self._factors(done)
        if factors is None:
            return memory

        def scaled(first: jax.Array, x: jax.Array) -> jax.Array:
            return first + factors.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * (x - first)

        return memory._replace(weights=jax.tree.map(scaled, base, memory.weights))

    def queries(self, x: jax.Array) -> Float[Array, "batch heads length head"]:
        query = self._heads(self.query_proj(self.retrieve_norm(x)))
        return jnp.moveaxis(self._head_norm(query, self.query_norm), 2, 1)

    def _writes(self, x: jax.Array, count: Int[Array, " batch"]) -> TitansWrites:
        """The writes that tokens make, leaves `[batch, heads, n, ...]`.

        A write that reaches beyond a sequence's first `count` tokens is skipped.
        """
        config, size = self.config, self.config.write_size
        batch, number = x.shape[0], x.shape[1] // size
        x = self.store_norm(x)
        dtype = compute_dtype(x.dtype)

        def split(x: jax.Array) -> jax.Array:
            x = x.astype(dtype).reshape(batch, number, size, *x.shape[2:])
            return jnp.moveaxis(x, 3, 1)  # [batch, heads, n, w, ...]

        # A write counts only if all of its tokens are real.
        ends = size * jnp.arange(1, number + 1, dtype=jnp.int32)
        complete = (ends[None, None] <= count[:, None, None]).astype(dtype)
        complete = jnp.broadcast_to(complete, (batch, config.num_heads, number))
        # One momentum and one share forgotten for all tokens of a write.
        tokens = x.reshape(batch, number, size, x.shape[2])
        if self.pool_proj is None:
            pooled = jnp.mean(tokens, axis=2)
        else:
            pooled = jnp.sum(tokens * jax.nn.softmax(self.pool_proj(tokens), axis=2), axis=2)

        def of_writes(projection: nnx.Linear | None, count: int) -> jax.Array | None:
            if projection is None:
                return None
            y = projection(pooled).astype(dtype).reshape(batch, number, config.num_heads, count)
            return jnp.moveaxis(y, 2, 1)

        orders = config.momentum_order
        momentum, combine = (of_writes(p, orders) for p in (self.momentum_proj, self.combine_proj))
        forget = of_writes(self.forget_proj, 1)
        scale = of_writes(self.tensor_rate_proj, config.num_tensors)
        # Bounded, because a step on a network can diverge.
        rate = config.max_rate * jax.nn.sigmoid(split(self.rate_proj(x)))
        return TitansWrites(
            key=split(self._head_norm(self._heads(self.key_proj(x)), self.key_norm)),
            value=split(self._heads(self.value_proj(x))),
            rate=rate * complete[..., None],
            momentum=jnp.zeros((*complete.shape, 0), dtype)
            if momentum is None
            else jax.nn.sigmoid(momentum),
            forget=jnp.zeros(complete.shape, dtype)
            if forget is None
            else jax.nn.sigmoid(forget[..., 0]),
            real=complete,
            combine=None if combine is None else jax.nn.softmax(combine, axis=-1),
            tensor_scale=None if scale is None else jax.nn.sigmoid(scale),
        )

    def merge(
        self, x: jax.Array, read: Float[Array, "batch length heads head"]
    ) -> Float[Array, "batch length model"]:
        read = self._head_norm(read, self.output_norm)
        if self.gate_proj is not None:
            # A number for each head, so that heads without an answer can be silent.
            gate = jax.nn.sigmoid(self.gate_proj(self.retrieve_norm(x)))
            read = read * gate[..., None].astype(read.dtype)
        read = read.reshape(*x.shape[:2], -1).astype(x.dtype)
        return read if self.out_proj is None else self.out_proj(read)

    def _heads(self, x: jax.Array) -> Float[Array, "batch length heads head"]:
        x = x.reshape(*x.shape[:2], self.config.num_heads, self.config.head_dim)
        return x.astype(compute_dtype(x.dtype))

    def _head_norm(self, x: jax.Array, weight: nnx.Param | None) -> Any:
        """Each head at unit root mean square, times `1 + weight`."""
        if weight is None:
            return x
        return rms_normalize(x, eps=self.norm_eps) * (1 + weight[...].astype(x.dtype)[None, None])
