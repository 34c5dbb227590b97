"""Any matrix memory as a token mixer."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.documents import document_numbers, pack_starts
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.recurrence.decay_starts import bias_initializer
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.convolution import convolution_inputs, inputs_before
from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig, Mask, Starts
from fwpkm_jax.layers.mixers.memory_heads import MemoryHeads, keys_as_queries
from fwpkm_jax.layers.norms import GatedRMSNorm
from fwpkm_jax.layers.parameters import linear_map, parameter
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.base import GateInputs, strength_axis
from pallas_kernels.short_convolution import Part, short_convolution


@dataclass(frozen=True, kw_only=True)
class MatrixFrame(MemoryHeads):
    """Shape of a layer with a matrix memory, for every rule."""

    decay_rank: Count = 16
    """Width between the two projections of a decay or a strength per channel."""


@dataclass(frozen=True, kw_only=True)
class MatrixMemoryConfig(MatrixFrame):
    """Shape of the layers that a decoder names by their rules, and the rules' settings."""

    rules: tuple[AbstractMatrixRule, ...] = ()
    """Rules with settings of their own, at most one of a kind; the others are as registered."""

    def __post_init__(self):
        super().__post_init__()
        kinds = [type(rule).__name__ for rule in self.rules]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"rules={kinds} has two of a kind; a mixer's name could mean either.")

    def rule(self, name: str) -> AbstractMatrixRule:
        """The rule of the mixer `name`, a key of `MATRIX_RULES`."""
        own = [rule for rule in self.rules if type(rule) is MATRIX_RULES[name]]
        return own[0] if own else MATRIX_RULES[name]()

    def check_used(self, mixers: Sequence[AbstractMixerConfig]) -> None:
        """Raises ValueError unless each of `rules` is the rule of one of these mixers."""
        used = [mixer.rule for mixer in mixers if isinstance(mixer, MatrixMixerConfig)]
        for rule in self.rules:
            if rule not in used:
                raise ValueError(f"matrix.rules sets {rule}, which no layer of mixers uses.")


@dataclass(frozen=True, kw_only=True)
class MatrixMixerConfig(MatrixFrame, AbstractMixerConfig):
    """A layer with a matrix memory and its rule."""

    rule: AbstractMatrixRule
    """How the memory is written and read."""

    @classmethod
    def named(cls, name: str, config: MatrixMemoryConfig) -> "MatrixMixerConfig":
        """The layer of the rule of that name, in the shape of `config`."""
        shape = {field.name: getattr(config, field.name) for field in fields(MatrixFrame)}
        return cls(rule=config.rule(name), **shape)

    def build(self, model_dim: int, **shared: Any) -> "MatrixMemory":
        return MatrixMemory(self.rule, self, model_dim, **shared)

    @property
    def label(self) -> str:
        return self.rule.form.name


class MatrixMemoryCache(NamedTuple):
    """What the layer keeps of the tokens before."""

    conv_inputs: Float[Array, "batch reach channels"]
    """The latest `conv_width - 1` inputs of the convolution, oldest first; none without one."""
    memory: Any
    """The rule's memory, at least float32."""


class MatrixMemory(AbstractMixer):
    """A matrix memory between projections, for some rules a short convolution, and a gated norm.

        q, k, v = features(SiLU(convolution(projections of x)))
        y = out_proj(norm(rule(q, k, v, gates(x))) * SiLU(projection of x))

    The rule defines everything that differs between rules: `learned_gates`, `gates`, `features`,
    `convolution` and `steps`. Further parts of published layers (Mamba-2's added input, RetNet's
    rotation) are left out, so that comparisons are between rules, not between blocks.
    """

    def __init__(
        self,
        rule: AbstractMatrixRule,
        config: MatrixFrame,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(init_std)
        # Not split along heads: every device computes all heads of its sequences.
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)
        heads, values = config.num_value_heads, config.num_value_heads * config.value_head_dim
        keys = config.num_key_heads * config.key_head_dim
        self.rule, self.config = rule, config
        # Columns of queries, of all writes' keys, and of all writes' values.
        self.widths = (keys, rule.steps * keys, rule.steps * values)
        self.in_proj = linear(model_dim, sum(self.widths) + values, "embed")
        self.out_proj = linear(values, model_dim, "heads", "embed")
        self.norm = GatedRMSNorm(config.value_head_dim, eps=norm_eps)
        channels = (config.conv_width, sum(self.widths))
        conv_weight = init(rngs.params(), channels, jnp.float32) if rule.convolution else None
        self.conv_weight = None if conv_weight is None else parameter(conv_weight, "convolution")
        if config.key_start == "queries":
            self.in_proj.kernel[...] = keys_as_queries(self.in_proj.kernel[...], keys)
            if self.conv_weight is not None:
                self.conv_weight[...] = keys_as_queries(self.conv_weight[...], keys)
        learned = rule.learned_gates
        start = config.decay_start
        decay_bias = bias_initializer(start, learned.decay_bias, learned.decay_of_step)
        strength_bias = bias_initializer(start, learned.strength_bias, learned.strength_of_step)

        def gate(per: Any, last: tuple[int, ...], numbers: int, inputs: str | None, bias: Any):
            """A projection to numbers per head, by way of a low rank if channels have their own."""
            biased = {"use_bias": True, "bias_init": bias}
            numbers *= math.prod(last)
            if {"pair", "key", "value"}.isdisjoint(per if isinstance(per, tuple) else (per,)):
                return linear(model_dim, numbers, inputs, **biased)
            # A full projection to every channel would be as large as those of keys and values.
            up = linear(config.decay_rank, numbers, None, **biased)
            return nnx.Sequential(linear(model_dim, config.decay_rank, None), up)

        decay, strength = None, None
        if learned.decay:
            decay = gate(rule.decay, self._decay_axis, heads, None, decay_bias)
        if learned.strength:
            writes = rule.steps * heads
            strength = gate(rule.strength, self._strength_axis, writes, "embed", strength_bias)
        self.decay_proj, self.strength_proj = decay, strength
        # As Gated DeltaNet's: uniform in (0, 16]; 1 - u, because log 0 must not occur.
        uniform = 1 - jax.random.uniform(rngs.params(), (heads,), jnp.float32)
        self.log_rate = parameter(jnp.log(16 * uniform), "gate") if learned.log_rate else None
        key_bias = None
        if learned.key_of_step is not None:
            draw = bias_initializer(start, 0.0, learned.key_of_step)
            key_bias = draw(rngs.params(), (self.widths[1],), jnp.float32)
        self.key_bias = None if key_bias is None else parameter(key_bias, "bias")
        first = None
        if rule.learned_start:
            sizes = (heads, config.key_head_dim, config.value_head_dim)
            shape = rule.init(1, *sizes, dtype=jnp.float32).shape[1:]
            first = parameter(init(rngs.params(), shape, jnp.float32), "embedding")
        self.first_memory = first

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> MatrixMemoryCache:
        config = self.config
        # As many inputs as the convolution looks back on.
        reach = config.conv_width - 1 if self.rule.convolution else 0
        sizes = (config.num_value_heads, config.key_head_dim, config.value_head_dim)
        memory = self.rule.init(batch, *sizes, dtype=compute_dtype(dtype))
        if self.first_memory is not None:
            memory = jnp.broadcast_to(self.first_memory[...].astype(memory.dtype), memory.shape)
        conv_inputs = jnp.zeros((batch, reach, sum(self.widths)), dtype)
        return MatrixMemoryCache(conv_inputs, memory)

    @property
    def output_map(self) -> nnx.Linear:
        return self.out_proj

    def mix(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: MatrixMemoryCache | None = None,
        axis: SequenceAxis | None = None,
    ) -> tuple[Float[Array, "batch length model"], MatrixMemoryCache | None]:
        """Padding neither writes nor decays nor shifts the convolution."""
        batch, length, _ = x.shape
        packing = None if mask is None else pack_tokens(mask)
        counts = None if packing is None else packing.counts
        x, starts = pack(x, packing), None if starts is None else pack_starts(starts, packing)
        documents = None if starts is None else document_numbers(starts)
        projected = self.in_proj(x)
        conv_inputs = projected[..., : sum(self.widths)]
        # The rule needs a memory to begin with; only a stream gets one back.
        start = cache
        if start is None:
            start = self.init_cache(batch, max_length=length, dtype=conv_inputs.dtype)
        before = start.conv_inputs
        if axis is not None:
            before = inputs_before(conv_inputs, before, starts, axis=axis, counts=counts)
        mixed, gate = self._convolve(projected, before, documents)
        # Gates come from x itself, not from what the convolution mixed.
        tokens = self.tokens(x, mixed)
        if packing is not None:
            tokens = self.rule.skip(tokens, packing.is_real)
        fresh = {} if self.first_memory is None else {"fresh": self.first_memory[...]}
        if axis is not None:
            output, memory = self.rule.run_part(tokens, start.memory, starts, axis=axis, **fresh)
        else:
            # Decoding has one token at a time, for which a chunk would be padding, unless the other
            # form goes over all of a large memory.
            chunked = length > 1 or self.rule.sparse
            form = self.rule.run if chunked else self.rule.recurrent
            output, memory = form(tokens, start.memory, starts, **fresh)
        output = self.norm(output, gate.reshape(output.shape))
        y = unpack(self.out_proj(output.reshape(batch, length, -1)), packing)
        if cache is None:
            return y, None
        latest = convolution_inputs(before, conv_inputs, counts, documents)
        return y, MatrixMemoryCache(latest if axis is None else axis.from_last(latest), memory)

    def tokens(
        self,
        x: Float[Array, "batch length model"],
        mixed: Float[Array, "batch length channels"],
    ) -> Tokens:
        """The rule's inputs: all heads' queries, keys and values from `mixed`, gates from x."""
        config, batch = self.config, x.shape[0]
        keys, steps_keys, _ = self.widths
        query, key, value = jnp.split(mixed, (keys, keys + steps_keys), axis=-1)
        if self.key_bias is not None:
            # In at least float32: a small bias would vanish beside a bfloat16 key.
            key = key.astype(compute_dtype(key.dtype)) + self.key_bias[...][None, None]
        key_heads = config.num_key_heads, config.key_head_dim
        query, key = (y.reshape(batch, -1, *key_heads) for y in (query, key))
        value = value.reshape(batch, -1, config.num_value_heads, config.value_head_dim)
        query, key, value = self.rule.features(query, key, value)
        # Value heads of a group read and write under the same keys, each in a memory of its own.
        shared_by = config.num_value_heads // config.num_key_heads
        query, key = (jnp.repeat(y, shared_by, axis=2) for y in (query, key))
        return Tokens(query, key, value, *self.rule.gates(self._gate_inputs(x)))

    @property
    def _decay_axis(self) -> tuple[int, ...]:
        """What a decay has after the axis of heads."""
        return (self.config.key_head_dim,) if self.rule.decay == "key" else ()

    @property
    def _strength_axis(self) -> tuple[int, ...]:
        """What a strength has after the axis of heads."""
        widths = self.config.key_head_dim, self.config.value_head_dim
        return strength_axis(self.rule.strength, *widths)

    def _gate_inputs(self, x: Float[Array, "batch length model"]) -> GateInputs:
        batch, length, heads = *x.shape[:2], self.config.num_value_heads
        dtype = compute_dtype(x.dtype)
        decay, strength = (
            None if projection is None else projection(x).astype(dtype)
            for projection in (self.decay_proj, self.strength_proj)
        )
        if decay is not None:
            decay = decay.reshape(batch, length, heads, *self._decay_axis)
        if strength is not None:
            writes = length * self.rule.steps
            strength = strength.reshape(batch, writes, heads, *self._strength_axis)
        log_rate = None if self.log_rate is None else self.log_rate[...].astype(dtype)
        return GateInputs((batch, length, heads), decay, strength, log_rate)

    def _convolve(
        self,
        projected: Float[Array, "batch length columns"],
        before: Float[Array, "batch reach channels"],
        documents: Int[Array, "batch length"] | None,
    ) -> tuple[Float[Array, "batch length channels"], Float[Array, "batch length gates"]]:
        """Queries, keys and values, with SiLU and in at least float32 if convolved, and gates."""
        channels = sum(self.widths)
        if self.conv_weight is None:
            mixed, gate = jnp.split(projected, [channels], axis=-1)
            return mixed, gate
        mixed, gate = short_convolution(
            projected[:, :, None],
            before,
            self.conv_weight[...],
            documents=documents,
            parts=(Part(channels), Part(projected.shape[-1] - channels, convolved=False)),
            backend="reference" if projected.shape[1] == 1 else "auto",
        )
        return mixed, gate
