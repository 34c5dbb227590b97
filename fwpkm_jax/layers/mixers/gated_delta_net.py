"""Gated DeltaNet: the gated delta rule as a token mixer, with the layout of published weights.

The same rule is `gated_deltanet` in the frame of all matrix memories (`matrix_memory`), for
comparisons between rules. A test checks that both give the same outputs from the same weights.
They stay two layers. Here projections are fused by key head; gates have the parameters `A_log` and
`dt_bias`, which have these names in checkpoints, exports and published weights; heads may lie on
several devices; and activations keep their dtype for the kernels. The frame has one projection of
all heads and one each for decay and strength, which every other rule needs. One layer for both
would rename the parameters of old runs.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.documents import document_numbers, pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import Packing, pack, pack_all, pack_tokens, unpack
from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.core.recurrence.decay_starts import draw_time_steps, softplus_bias
from fwpkm_jax.core.recurrence.gated_delta import recurrent_gated_delta_rule
from fwpkm_jax.core.recurrence.transition import before_part, delta_transition
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.convolution import convolution_inputs, inputs_before
from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig, Mask, Starts
from fwpkm_jax.layers.mixers.memory_heads import MemoryHeads, keys_as_queries
from fwpkm_jax.layers.mixers.registry import register_mixer
from fwpkm_jax.layers.mlp import ACTIVATIONS, Activation
from fwpkm_jax.layers.norms import GatedRMSNorm
from fwpkm_jax.layers.parameters import linear_map, parameter
from fwpkm_jax.layers.partition import BATCH, HEADS, Partition
from fwpkm_jax.literals import Count, Positive
from pallas_kernels.dispatch import Backend
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.short_convolution import Part, joined_inputs, short_convolution


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(MemoryHeads, AbstractMixerConfig):
    """Shape of a Gated DeltaNet layer; all but `decay_start` are the paper's by default."""

    chunk_size: Count = 64
    """Tokens solved for at once in plain JAX; changes speed, and results only by rounding."""
    backend: Backend = "auto"
    """Kernels or plain JAX for more than one token: "auto", "reference" or "pallas". The
    convolution has a kernel for Hopper GPUs and some sizes only, and is plain JAX otherwise."""
    max_strength: float = 1.0
    """Strongest write: 1 replaces what the memory has under a key, 2 turns its sign."""
    activation: Activation = "silu"
    """Of the convolution's output."""
    norm_eps: Positive | None = None
    """Added to the mean square in the gated norm; None: as in the model's other norms."""

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.max_strength <= 2:
            raise ValueError(
                f"max_strength={self.max_strength} must lie above 0 and at most at 2, or the "
                "memory grows without bound."
            )

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        keys = 2 * self.num_key_heads * self.key_head_dim
        return keys + self.num_value_heads * self.value_head_dim

    @property
    def projected_parts(self) -> tuple[Part, ...]:
        """What the fused projection yields for a key head: query, key, its values, their gates."""
        keys = self.key_head_dim
        values = self.num_value_heads // self.num_key_heads * self.value_head_dim
        key = Part(keys, head=keys)
        return key, key, Part(values), Part(values, convolved=False)

    def build(self, model_dim: int, **shared: Any) -> "GatedDeltaNet":
        return GatedDeltaNet(self, model_dim, **shared)

    @property
    def label(self) -> str:
        return "Gated DeltaNet"

    @property
    def split_numbers(self) -> Mapping[str, int]:
        return {"gdn.num_key_heads": self.num_key_heads}


register_mixer("gdn", lambda model: model.gdn)


class GatedDeltaNetCache(NamedTuple):
    """What the layer keeps of the tokens before."""

    conv_inputs: Float[Array, "batch reach channels"]
    """The latest `conv_width - 1` inputs of the convolution, oldest first."""
    memory: Float[Array, "batch heads key value"]
    """The delta rule's memory, at least float32."""


class Projections(NamedTuple):
    """What the layer computes from the two input projections of a token."""

    qkvz: Float[Array, "batch length key_heads columns"]
    """Of each key head its `projected_parts`: the convolution's inputs, and the output gates before
    SiLU."""
    log_decay: Float[Array, "batch length heads"]
    """Log of the share of the memory kept, at least float32."""
    beta: Float[Array, "batch length heads"]
    """Write strength, at least float32."""


class HeadWeights(NamedTuple):
    """The weights of single heads, without the linear maps."""

    conv_weight: Float[Array, "width channels"]
    """All queries, all keys, all values, joined."""
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"]


class GatedDeltaNet(AbstractMixer):
    """The gated delta rule between a short convolution and a gated norm.

    With q, k, v, z, a, b projections of the input, per head:

        q, k, v = SiLU(convolution(q, k, v)),  q, k at unit length
        log decay = -exp(A_log) softplus(a + dt_bias),  beta = max_strength sigmoid(b)
        y = out_proj(norm(delta rule) * SiLU(z))

    The fused projections yield for each key head [q, k, its v, its z] and [its b, its a], as
    published weights have it.

    References: Yang et al. 2024, arXiv:2412.06464; Grazzi et al. 2024, arXiv:2411.12537 (strengths
    to 2).
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(init_std)
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)
        values = config.num_value_heads * config.value_head_dim
        heads = config.num_value_heads
        self.config = config
        self.in_proj_qkvz = linear(model_dim, config.conv_channels + values, "embed", "heads")
        self.in_proj_ba = linear(model_dim, 2 * heads, "embed", "heads")
        self.out_proj = linear(values, model_dim, "heads", "embed")
        self.norm = GatedRMSNorm(config.value_head_dim, eps=config.norm_eps or norm_eps)
        conv_shape = (config.conv_width, config.conv_channels)
        taps = init(rngs.params(), conv_shape, jnp.float32)
        self.conv_weight = parameter(taps, "convolution")
        # A uniform in (0, 16]: 1 - u, because u can be 0 and log 0 must not occur.
        uniform = 1 - jax.random.uniform(rngs.params(), (heads,), jnp.float32)
        self.A_log = parameter(jnp.log(16 * uniform), "gate", ("heads",))
        if config.decay_start == "constant":
            dt_bias = jnp.ones((heads,), jnp.float32)
        else:
            dt_bias = softplus_bias(draw_time_steps(rngs.params(), (heads,)))
        self.dt_bias = parameter(dt_bias, "gate", ("heads",))
        if config.key_start == "queries":
            keys = config.key_head_dim
            kernel = self.in_proj_qkvz.kernel[...]
            # Columns go key head by key head: its query, its key, its values, their gates.
            by_head = kernel.reshape(model_dim, config.num_key_heads, -1)
            by_head = by_head.at[..., keys : 2 * keys].set(by_head[..., :keys])
            self.in_proj_qkvz.kernel[...] = by_head.reshape(kernel.shape)
            taps = self.conv_weight[...]
            self.conv_weight[...] = keys_as_queries(taps, config.num_key_heads * keys)

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> GatedDeltaNetCache:
        return empty_cache(self.config, batch, dtype)

    @property
    def output_map(self) -> nnx.Linear:
        return self.out_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> tuple[Float[Array, "batch length model"], GatedDeltaNetCache | None]:
        """Padding neither writes nor decays nor shifts the convolution."""
        packing = None if mask is None else pack_tokens(mask)
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)
        output, end = mix_heads(
            *(self.config, self.head_weights(), self.norm, self.project(x), cache),
            packing=packing,
            starts=starts,
        )
        y = unpack(self.out_proj(output.reshape(*x.shape[:2], -1)), packing)
        return y, None if cache is None else end

    def project(self, x: Float[Array, "batch length model"]) -> Projections:
        """The convolution's inputs, the gates, and how strongly to forget and write."""
        return split_projections(
            self.config, self.in_proj_qkvz(x), self.in_proj_ba(x), self.head_weights()
        )

    def head_weights(self) -> HeadWeights:
        """The weights of single heads, without the linear maps."""
        return HeadWeights(self.conv_weight[...], self.A_log[...], self.dt_bias[...])

    def mix_over_devices(
        self,
        x: Float[Array, "batch length model"],
        partition: Partition,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> tuple[Float[Array, "batch length model"], GatedDeltaNetCache | None]:
        """`mix`, each device with its own sequences, its own shard of each, and its own heads."""
        config, devices = self.config, partition.size(HEADS)
        for name, number in config.split_numbers.items():
            partition.check_divides(name, number, HEADS)
        # A device's heads are a layer of fewer heads.
        own = replace(
            config,
            num_key_heads=config.num_key_heads // devices,
            num_value_heads=config.num_value_heads // devices,
        )

        # Queries, keys and values are split by heads each; joined, a device's part would mix them.
        keys = config.num_key_heads * config.key_head_dim

        def by_kind(channels: jax.Array, sizes: tuple[int, int] = (keys, 2 * keys)):
            """Queries', keys' and values' channels apart, each of which is split by heads."""
            return jnp.split(channels, sizes, axis=-1)

        def mix(qkvz, ba, conv_parts, A_log, dt_bias, norm, mask, starts, before):
            packing = None if mask is None else pack_tokens(mask)
            qkvz, ba, starts = pack_all((qkvz, ba, starts), packing)
            # Each device joins the channels of its own heads.
            weights = HeadWeights(jnp.concatenate(conv_parts, axis=1), A_log, dt_bias)
            if before is not None:
                before = GatedDeltaNetCache(jnp.concatenate(before[0], axis=-1), before[1])
            output, end = mix_heads(
                *(own, weights, norm, split_projections(own, qkvz, ba, weights), before),
                packing=packing,
                starts=starts,
                axis=partition.sequence,
            )
            output = unpack(output.reshape(*output.shape[:2], -1), packing).reshape(output.shape)
            if before is None:
                return output, None
            sizes = own.num_key_heads * own.key_head_dim
            return output, (by_kind(end.conv_inputs, (sizes, 2 * sizes)), end.memory)

        weights = self.head_weights()
        by_head, of_head = partition.tokens(HEADS), P(HEADS)
        cache_spec = None if cache is None else (P(BATCH, None, HEADS), P(BATCH, HEADS))
        output, end = partition.run(
            mix,
            in_specs=(
                by_head,
                by_head,
                P(None, HEADS),
                of_head,
                of_head,
                P(),
                partition.tokens(),
                partition.tokens(),
                cache_spec,
            ),
            out_specs=(by_head, cache_spec),
        )(
            self.in_proj_qkvz(x),
            self.in_proj_ba(x),
            by_kind(weights.conv_weight),
            weights.A_log,
            weights.dt_bias,
            self.norm,
            mask,
            starts,
            None if cache is None else (by_kind(cache.conv_inputs), cache.memory),
        )
        if end is not None:
            end = GatedDeltaNetCache(jnp.concatenate(end[0], axis=-1), end[1])
        return self.out_proj(output.reshape(*x.shape[:2], -1)), end


def empty_cache(config: GatedDeltaNetConfig, batch: int, dtype: DTypeLike) -> GatedDeltaNetCache:
    """The cache before the first token; `dtype` of activations."""
    memory = (batch, config.num_value_heads, config.key_head_dim, config.value_head_dim)
    return GatedDeltaNetCache(
        conv_inputs=jnp.zeros((batch, config.conv_width - 1, config.conv_channels), dtype),
        memory=jnp.zeros(memory, compute_dtype(dtype)),
    )


def split_projections(
    config: GatedDeltaNetConfig,
    qkvz: Float[Array, "batch length qkvz"],
    ba: Float[Array, "batch length ba"],
    weights: HeadWeights,
) -> Projections:
    """The two input projections by key head, and the gates of the rule, of any subset of heads."""
    tokens, key_heads = qkvz.shape[:2], config.num_key_heads
    # Of each key head first the strengths of its value heads, then their decays.
    b, a = jnp.split(ba.reshape(*tokens, key_heads, -1), 2, axis=-1)

    dtype = compute_dtype(qkvz.dtype)
    b, a = (y.reshape(*tokens, config.num_value_heads).astype(dtype) for y in (b, a))
    return Projections(
        qkvz=qkvz.reshape(*tokens, key_heads, -1),
        log_decay=softplus_decay(weights.A_log[None, None], a + weights.dt_bias[None, None]),
        beta=config.max_strength * jax.nn.sigmoid(b),
    )


def mix_heads(
    config: GatedDeltaNetConfig,
    weights: HeadWeights,
    norm: GatedRMSNorm,
    projections: Projections,
    cache: GatedDeltaNetCache | None,
    *,
    packing: Packing | None = None,
    starts: Starts = None,
    axis: SequenceAxis | None = None,
) -> tuple[Float[Array, "batch length heads value"], GatedDeltaNetCache]:
    """The gated norm's output, and the new cache, of the heads that `config` counts.

    The projections are of packed tokens if there is a `packing`, and `starts` of them the first of
    documents. With an `axis` the tokens are this device's shard of each sequence, and the caches
    are those before and after the whole sequence.
    """
    qkvz, log_decay, beta = projections
    parts, dtype = config.projected_parts, qkvz.dtype
    tokens, length = qkvz.shape[:2], qkvz.shape[1]
    # What the next piece convolves again: queries, keys and values, without the gates.
    conv_inputs = joined_inputs(qkvz, parts)
    documents = None if starts is None else document_numbers(starts)
    counts = None
    if packing is not None:  # Padding neither writes nor decays.
        counts, real = packing.counts, packing.is_real[:, :, None]
        log_decay, beta = jnp.where(real, log_decay, 0), jnp.where(real, beta, 0)
    if cache is None:
        cache = empty_cache(config, tokens[0], dtype)
    # A shard convolves the last inputs of the shard before it.
    before = cache.conv_inputs
    if axis is not None:
        before = inputs_before(conv_inputs, before, starts, axis=axis, counts=counts)
    shared_by = config.num_value_heads // config.num_key_heads
    query, key, value, gate = short_convolution(
        qkvz,
        before,
        weights.conv_weight,
        documents=documents,
        parts=parts,
        activation=ACTIVATIONS[config.activation],
        # Cotangents of queries and keys that heads share are summed before they are rounded.
        dtype=dtype if shared_by == 1 else compute_dtype(dtype),
        backend="reference" if length == 1 or config.backend == "reference" else "auto",
    )
    heads = (*tokens, config.num_key_heads, config.key_head_dim)
    # Value heads of a group read and write under the same keys, each in a memory of its own.
    query, key = (jnp.repeat(y.reshape(heads), shared_by, axis=2) for y in (query, key))
    # The convolution and the norm compute in float32; activations go on in their own dtype, of
    # which kernels for bfloat16 read half the bytes.
    query, key, value = (y.astype(dtype) for y in (query, key, value))
    value, gate = (y.reshape(*tokens, -1, config.value_head_dim) for y in (value, gate))
    # A single token needs no chunk; the recurrence is one product and one sum.
    rule = recurrent_gated_delta_rule
    if length > 1:
        rule = functools.partial(
            chunk_gated_delta_rule, chunk_size=config.chunk_size, backend=config.backend
        )
    memory = cache.memory
    gates = {"log_decay": log_decay, "beta": beta, "starts": starts}
    if axis is not None:
        # What the shard does to any memory, so that devices need not wait for each other.
        part = delta_transition(key, value, **gates, chunk_size=config.chunk_size)
        memory = before_part(part, memory, axis=axis)
    output, memory = rule(query, key, value, **gates, initial_state=memory)
    # Before the activation: the next piece convolves them again.
    latest_inputs = convolution_inputs(before, conv_inputs, counts, documents)
    end = GatedDeltaNetCache(conv_inputs=latest_inputs, memory=memory)
    return norm(output, gate), end if axis is None else axis.from_last(end)
