"""The decoder of multi-query associative recall: a convolution, then the memory to compare.

It is Zoology's, without an MLP: learned embedding with tied head, LayerNorm before each layer, and
the normalised residual stream added to itself after each layer (there the MLP is the identity).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fwpkm_jax.core.recurrence.decay_starts import DecayStart
from fwpkm_jax.core.sequence.convolution import causal_convolution
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.mixers import (
    AbstractMixer,
    AbstractMixerConfig,
    AttentionConfig,
    Titans,
    TitansConfig,
    mixer_config,
)
from fwpkm_jax.layers.mixers.lact import LaCT, LaCTConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemory, MatrixMemoryConfig
from fwpkm_jax.layers.mixers.memory_heads import keys_as_queries
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.rules.matrix import MATRIX_RULES

CONV_WIDTH = 3
"""Tokens that the first layer's convolution sees."""
FWPKM_SUBKEYS = (8, 16, 32)
"""Sub-keys of FwPKM's sizes; a memory has their square as slots."""
PUBLISHED_ATTENTION = "attention_positions"
"""Attention in both layers, with learned positions and no convolution: the published cell."""
NAMES = (
    *(PUBLISHED_ATTENTION, "attention", "gated_deltanet", "deltanet", "gla", "mamba2"),
    *(f"fwpkm_{n}" for n in FWPKM_SUBKEYS),
    *("titans", "ttt_linear", "ttt_mlp", "lact", "fwmlp", "swa"),
    *(name for name in MATRIX_RULES if name not in ("gated_deltanet", "deltanet", "gla", "mamba2")),
)
"""All memories, in the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes that all memories share."""

    vocabulary: int = 8192
    """Number of ids."""
    width: int = 64
    """Width of the residual stream."""
    heads: int = 2
    """Heads of a memory."""
    head_dim: int = 0
    """Channels of a head of matrix memories, Titans and LaCT; 0: `width / heads`."""
    chunk: int = 8
    """Tokens between two writes of FwPKM, FwMLP and LaCT; window of windowed attention and LaCT."""
    stacked: bool = False
    """One layer without convolution, and a frozen embedding of unit vectors."""
    decay_start: DecayStart = "time_steps"
    """Where the learned decays of matrix memories begin."""
    tied_start: bool = False
    """The memory's keys begin as the queries of the same token, so that a question's query is near
    the key of its pair before any training. FwPKM writes where it reads, always."""


Layer = AbstractMixerConfig | FastWeightConfig


def layers_of(name: str, layout: Layout) -> tuple[Layer, ...]:
    """The layers of a memory, without the convolution before them."""
    if name == PUBLISHED_ATTENTION:
        return (_attention(replace(layout, heads=1)),) * (1 if layout.stacked else 2)
    # A stacked position has a key and its value, so a memory need not look ahead.
    lookahead = int(not layout.stacked)
    if name.startswith("fwpkm_"):
        subkeys = int(name.removeprefix("fwpkm_"))
        rule = FwPKM(
            num_subkeys=subkeys,
            key_dim=layout.width,
            value_dim=layout.width,
            top_k=8,
            lookahead=lookahead,
        )
        return (FastWeightConfig(rule=rule, chunk_size=layout.chunk),)
    if name == "fwmlp":
        width = layout.width
        rule = FwMLP(lookahead=lookahead, key_dim=width, value_dim=width, hidden_dim=width)
        return (FastWeightConfig(rule=rule, chunk_size=layout.chunk),)
    heads, head_dim = layout.heads, layout.head_dim or layout.width // layout.heads
    matrix = dict.fromkeys(("num_key_heads", "num_value_heads"), heads)
    matrix |= dict.fromkeys(("key_head_dim", "value_head_dim"), head_dim)
    rules = ()
    if name in MATRIX_RULES:  # The convolution before the layer is the same for all.
        rule = replace(MATRIX_RULES[name](), convolution=False)
        # Documents are short. It changes results by rounding only.
        rules = (replace(rule, chunk_size=16) if name == "sdm_heads" else rule,)
    model = ModelConfig(
        mixers=(name,),
        window=layout.chunk,
        attention=_attention(layout),
        matrix=MatrixMemoryConfig(
            **matrix,
            rules=rules,
            decay_start=layout.decay_start,
            key_start="queries" if layout.tied_start else "own",
        ),
        titans=TitansConfig(num_heads=heads, head_dim=head_dim, chunk_size=2 * layout.chunk),
        lact=LaCTConfig(
            num_heads=heads,
            num_fast_heads=heads,
            hidden_dim=head_dim,
            chunk_size=layout.chunk,
            window=layout.chunk,
        ),
    )
    return (mixer_config(name, model),)


def _attention(layout: Layout) -> AttentionConfig:
    """Attention without what newer layers add: no gate, no norms, no rotation, but biases."""
    return AttentionConfig(
        num_heads=layout.heads,
        num_kv_heads=layout.heads,
        head_dim=layout.width // layout.heads,
        rotary_fraction=0.0,
        gated=False,
        qk_norm="none",
        bias=True,
        backend="xla",
    )


class Frozen(nnx.Variable):
    """A weight that is not trained."""


class GatedConvolution(nnx.Module):
    """`x + convolution(x) * projection(x)`, the layer before every memory."""

    def __init__(self, width: int, *, init_std: float, rngs: nnx.Rngs):
        bound = 1 / math.sqrt(CONV_WIDTH)

        def uniform(*shape: int) -> nnx.Param:
            draw = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
            return nnx.Param(draw)

        self.taps, self.bias = uniform(CONV_WIDTH, width), uniform(width)
        init = nnx.initializers.normal(init_std)
        self.proj = nnx.Linear(width, width, kernel_init=init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        before = jnp.zeros((len(x), CONV_WIDTH - 1, x.shape[-1]), x.dtype)
        mixed = causal_convolution(x, before, self.taps[...]) + self.bias[...][None, None]
        return x + mixed * self.proj(x)


class Decoder(nnx.Module):
    """Embedding, layers, final norm; the head is `logits`."""

    def __init__(
        self, name: str, layout: Layout, *, length: int, init_std: float = 0.02, rngs: nnx.Rngs
    ):
        """Draws the weights.

        Args:
          name: the memory.
          layout: sizes.
          length: positions that a decoder with learned positions has.
          init_std: standard deviation of initial weights.
          rngs: the stream `params`.
        """
        self.layout, width = layout, layout.width
        init = nnx.initializers.normal(init_std)
        shared = {"init_std": init_std, "rngs": rngs}
        table = init(rngs.params(), (layout.vocabulary, width), jnp.float32)
        if layout.stacked:
            table = table / jnp.linalg.norm(table, axis=1, keepdims=True)
        self.embedding = Frozen(table) if layout.stacked else nnx.Param(table)

        def linear(inputs: int) -> nnx.Linear | None:
            if not layout.stacked:
                return None
            return nnx.Linear(inputs, width, kernel_init=init, rngs=rngs)

        self.in_proj, self.out_proj = linear(2 * width), linear(width)
        places = not layout.stacked and name == PUBLISHED_ATTENTION
        positions = init(rngs.params(), (length, width), jnp.float32) if places else None
        self.positions = None if positions is None else nnx.Param(positions)
        built: list[nnx.Module] = []
        if not layout.stacked and name != PUBLISHED_ATTENTION:
            built.append(GatedConvolution(width, init_std=init_std, rngs=rngs))
        for layer in layers_of(name, layout):
            if isinstance(layer, FastWeightConfig):
                built.append(FastWeight(layer, width, **shared))
            else:
                built.append(layer.build(width, **shared))
        self.layers = nnx.List(built)
        self.norms = nnx.List([nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs) for _ in built])
        self.after = nnx.List([nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs) for _ in built])
        self.final_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        for layer in built:
            if layout.tied_start and not isinstance(layer, GatedConvolution | MatrixMemory):
                _tie(layer)
            output = layer.out_proj if isinstance(layer, FastWeight) else None
            output = getattr(layer, "output_map", output)
            if output is not None:
                output.kernel[...] = output.kernel[...] / math.sqrt(2 * len(built))

    def init_memory(self, rng: jax.Array) -> Any:
        """The fast weights before a sequence, one group; () without a `FastWeight` layer."""
        found = [layer for layer in self.layers if isinstance(layer, FastWeight)]
        return found[0].init_memory(rng) if found else ()

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        memory: Any,
        *,
        kept: jax.Array | None = None,
    ) -> jax.Array:
        """The head's inputs at the questions, `[batch, questions, width]`.

        Args:
          tokens: int32 `[batch, length]`, or `[batch, length, 2]` of a stacked task.
          positions: int32 `[batch, questions]`, where the questions are.
          memory: of `init_memory`; every sequence starts from it.
          kept: `[batch, length, width]`, multiplies the embedded tokens (dropout); None: 1.
        """
        x = self.embed(tokens)
        x = x if kept is None else x * kept
        batch = len(tokens)
        own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (batch, *leaf.shape[1:])), memory)
        for layer, norm, after in zip(self.layers, self.norms, self.after, strict=True):
            y = norm(x)
            if isinstance(layer, GatedConvolution):
                y = layer(y)
            elif isinstance(layer, FastWeight):
                y = layer(y, own)[0]
            else:
                y = layer(y)[0]
            x = x + y
            x = x + after(x)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        x = self.final_norm(x)
        return x if self.out_proj is None else self.out_proj(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[batch, questions, ids]`; of a stacked task the ids are those of values."""
        table = self.embedding[...]
        table = table[self.layout.vocabulary // 2 :] if self.layout.stacked else table
        return x @ table.T

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The residual stream before the first layer, `[batch, length, width]`."""
        table = self.embedding[...]
        if self.in_proj is not None:
            rows = jnp.where(tokens[..., None] < 0, 0.0, table[jnp.maximum(tokens, 0)])
            return self.in_proj(rows.reshape(*tokens.shape[:2], -1))
        x = table[tokens]
        return x if self.positions is None else x + self.positions[...][None, : x.shape[1]]


def _tie(layer: nnx.Module) -> None:
    """Copies a memory's map to queries onto that to keys, as `key_start` of matrix memories does.

    Raises:
      ValueError: another memory; FwPKM and FwMLP have one map for both.
    """
    if isinstance(layer, Titans):
        layer.key_proj.kernel[...] = layer.query_proj.kernel[...]
    elif isinstance(layer, LaCT):
        projection, keys = layer.qkv_proj, layer.qkv_proj.in_features
        projection.kernel[...] = keys_as_queries(projection.kernel[...], keys)
    else:
        raise ValueError(
            "tied_start is for matrix memories, Titans, TTT and LaCT, not for "
            f"{type(layer).__name__}; leave it out."
        )


def state_bytes(name: str, layout: Layout, *, length: int) -> tuple[int, int]:
    """Bytes kept of a sequence of `length` tokens, and those that its next token reads.

    All layers count, with convolutions, windows and tokens that wait for their write. A token reads
    all of it, except that FwPKM and SDM read the slots they have chosen and not the whole table.
    """

    def state() -> Any:
        model = Decoder(name, layout, length=length, rngs=nnx.Rngs(0))
        kept = []
        for layer in model.layers:
            if isinstance(layer, GatedConvolution):
                kept.append(jnp.zeros((CONV_WIDTH - 1, layout.width)))
            elif isinstance(layer, FastWeight):
                kept.append(layer.init_memory(jax.random.key(0)))
                size = {"max_chunk_size": layout.chunk, "dtype": jnp.float32}
                kept.append(layer.init_pending(1, 1, **size))
            elif isinstance(layer, AbstractMixer):
                kept.append(layer.init_cache(1, max_length=length, dtype=jnp.float32))
        return kept

    total = _bytes(jax.eval_shape(state))
    unread = sum(_unread(layer) for layer in layers_of(name, layout))
    if name == "sdm_heads":
        head_dim = layout.head_dim or layout.width // layout.heads
        rows = head_dim // 2  # As many slots are written, and as many read.
        unread = 4 * layout.heads * head_dim * max(0, rows**2 - 2 * rows)
    return total, total - unread


def _unread(layer: Layer) -> int:
    """Bytes of the slots that a token does not read."""
    if not isinstance(layer, FastWeightConfig) or not isinstance(layer.rule, FwPKM):
        return 0
    return 4 * layer.rule.inactive_parameters


def _bytes(tree: Any) -> int:
    leaves: Sequence[Any] = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
