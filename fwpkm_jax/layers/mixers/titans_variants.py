"""Titans: attention with a neural memory as its context, its gate or the layer before it.

References: Behrouz et al. 2025, arXiv:2501.00663, section 4.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.mixers.base import (
    AbstractMixer,
    AbstractMixerConfig,
    Mask,
    ReadBefore,
    Starts,
)
from fwpkm_jax.layers.mixers.persistent import PersistentTokens
from fwpkm_jax.layers.mixers.registry import register_mixer
from fwpkm_jax.layers.mixers.titans import Titans
from fwpkm_jax.layers.mixers.titans_config import TitansConfig
from fwpkm_jax.layers.mixers.titans_mac import TitansGate, TitansMAC
from fwpkm_jax.layers.norms import RMSNorm
from fwpkm_jax.literals import check_fields

Output = Float[Array, "batch length model"]


Variant = Literal["alone", "mac", "mag", "mal"]
"""alone: the memory without attention. mac, mag, mal: the memory as a context of attention, as a
gate on it, and as the layer before it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TitansMixerConfig(AbstractMixerConfig):
    """A Titans memory, alone or with a window of attention."""

    variant: Variant
    """How memory and attention are combined."""
    memory: TitansConfig = dataclasses.field(default_factory=TitansConfig)
    """The memory, and the persistent tokens before the sequence."""
    attention: AttentionConfig = dataclasses.field(default_factory=AttentionConfig)
    """Its window is not used by mac, which attends within segments of `memory.chunk_size`."""

    def __post_init__(self):
        check_fields(self)
        if self.variant == "mac" and self.memory.average_steps:
            raise ValueError(
                "titans.average_steps=True is for a memory alone or beside attention; titans_mac "
                "reads the weights in the middle of a chunk. Turn it off."
            )
        if self.variant == "mac" and self.memory.chunk_size is None:
            raise ValueError(
                "titans.chunk_size=None leaves titans_mac without segments to attend in; give it a "
                "number of tokens."
            )

    def build(self, model_dim: int, **shared: Any) -> AbstractMixer:
        if self.variant == "mac":
            return TitansMAC(self.memory, self.attention, model_dim, **shared)
        if self.variant == "mag":
            return TitansMAG(self.memory, self.attention, model_dim, **shared)
        if self.variant == "mal":
            mixer = TitansMAL(self.memory, self.attention, model_dim, **shared)
        else:
            mixer = Titans(self.memory, model_dim, **shared)
        return _behind_persistent(mixer, self.memory, model_dim, rngs=shared["rngs"])

    @property
    def label(self) -> str:
        return {
            "alone": "a Titans memory",
            "mac": "a Titans memory as the context of attention",
            "mag": "a Titans memory that gates attention",
            "mal": "a Titans memory before attention",
        }[self.variant]


def _register(name: str, variant: Variant) -> None:
    def build(model: Any) -> TitansMixerConfig:
        attention = dataclasses.replace(model.attention, window=model.window)
        return TitansMixerConfig(variant=variant, memory=model.titans, attention=attention)

    register_mixer(name, build)


def _register_ttt(name: str, depth: int) -> None:
    """TTT's network and writes as in the authors' code, with the heads of `model.titans`."""

    def build(model: Any) -> TitansMixerConfig:
        memory = TitansConfig(
            num_heads=model.titans.num_heads,
            head_dim=model.titans.head_dim,
            depth=depth,
            expansion=4.0,
            chunk_size=16,
            momentum_order=0,
            # Of a whole square's mean: the published rates, 1 and 0.1, of half of its sum.
            max_rate=0.5 if depth == 1 else 0.05,
            average_steps=True,
            forgetting=False,
            bias=True,
            write_norm=False,
            norm_bias=True,
            memory_norm_eps=1e-6,
            gelu="tanh",
            memory_init_std=0.02,
        )
        return TitansMixerConfig(variant="alone", memory=memory)

    register_mixer(name, build)


_register("titans", "alone")
_register_ttt("ttt_linear", 1)
_register_ttt("ttt_mlp", 2)
_register("titans_mac", "mac")
_register("titans_mag", "mag")
_register("titans_mal", "mal")


def _behind_persistent(
    mixer: AbstractMixer, config: TitansConfig, model_dim: int, *, rngs: nnx.Rngs
) -> AbstractMixer:
    if config.num_persistent == 0:
        return mixer
    return PersistentTokens(mixer, config.num_persistent, model_dim, rngs=rngs)


class TitansPairCache(NamedTuple):
    """What a stream carries if memory and attention read it in parallel or one after the other.

    Attributes:
      attention: an `AttentionCache`.
      memory: a `TitansCache`.
    """

    attention: Any
    memory: Any


class AbstractTitansPair(AbstractMixer):
    """A memory beside windowed attention, each with a cache of its own."""

    memory: AbstractMixer
    attention: Attention

    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> TitansPairCache:
        """The cache of a stream that has read only the persistent tokens, if there are any."""
        both = self.attention, self.memory
        caches = (x.init_cache(batch, max_length=max_length, dtype=dtype) for x in both)
        return TitansPairCache(*caches)


class TitansMAL(AbstractTitansPair):
    """Memory as a layer: windowed attention over the outputs of the memory."""

    def __init__(
        self, config: TitansConfig, attention: AttentionConfig, model_dim: int, **shared: Any
    ):
        """Args: `shared` as of `Attention`."""
        self.memory = Titans(config, model_dim, **shared)
        self.norm = RMSNorm(model_dim, eps=shared.get("norm_eps", 1e-5))
        self.attention = Attention(attention, model_dim, **shared)

    @property
    def output_map(self) -> nnx.Linear:
        return self.attention.o_proj

    def mix(
        self,
        x: Output,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: TitansPairCache | None = None,
        before: ReadBefore | None = None,
        axis: SequenceAxis | None = None,
    ) -> tuple[Output, TitansPairCache | None]:
        """Memory and window have both read the tokens `before` each document.

        Shards of sequences go through the memory in turn, then through the window at the same time.
        """
        attention, memory = (None, None) if cache is None else cache
        of_attention, of_memory = None, None
        if before is not None:
            of_attention, of_memory = (ReadBefore(own, before.number) for own in before.cache)
        given: dict[str, Any] = {"mask": mask, "starts": starts, "axis": axis}
        # Attention reads what the memory made of the tokens, so the memory comes first.
        remembered, memory = self.memory.mix_shard(x, cache=memory, before=of_memory, **given)
        y, attention = self.attention.mix_shard(
            self.norm(remembered), cache=attention, before=of_attention, **given
        )
        return y, None if cache is None else TitansPairCache(attention, memory)


class TitansMAG(AbstractTitansPair):
    """Memory as a gate: the memory's output gates that of windowed attention.

    Both read the persistent tokens before the sequence; attention sees them from every token.
    """

    def __init__(
        self, config: TitansConfig, attention: AttentionConfig, model_dim: int, **shared: Any
    ):
        """Args: `shared` as of `Attention`."""
        memory = Titans(config, model_dim, **shared)
        self.memory = _behind_persistent(memory, config, model_dim, rngs=shared["rngs"])
        self.attention = Attention(attention, model_dim, **shared)
        self.gate = TitansGate(model_dim, **shared)

    @property
    def takes_documents(self) -> bool:
        return self.memory.takes_documents

    @property
    def output_map(self) -> nnx.Linear:
        return self.gate.out_proj

    def mix(
        self,
        x: Output,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: TitansPairCache | None = None,
        axis: SequenceAxis | None = None,
    ) -> tuple[Output, TitansPairCache | None]:
        """Shards of sequences go through the memory in turn, through the window at the same time.

        With persistent tokens they go through both in turn.
        """
        tokens = None
        if isinstance(self.memory, PersistentTokens):
            if axis is not None:
                return self.mix_in_turn(x, axis=axis, cache=cache, mask=mask, starts=starts)
            # The same learned tokens for both: attention sees them, the memory has read them.
            tokens = self.memory.tokens[...].astype(x.dtype)
        attention, memory = (None, None) if cache is None else cache
        given: dict[str, Any] = {"mask": mask, "starts": starts, "axis": axis}
        y, attention = self.attention.mix_shard(x, cache=attention, persistent=tokens, **given)
        remembered, memory = self.memory.mix_shard(x, cache=memory, **given)
        out = self.gate(y, remembered)
        return out, None if cache is None else TitansPairCache(attention, memory)
