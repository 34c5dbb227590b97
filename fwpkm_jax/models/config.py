"""The layout of a decoder as data."""

from dataclasses import dataclass, field
from typing import Literal

from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import (
    AbstractMixerConfig,
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    MatrixMemoryConfig,
    OwnMemory,
    TitansConfig,
)
from fwpkm_jax.layers.mixers.registry import check_mixer_name, mixer_config, mixer_module
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.literals import check_literals

Mixer = str | AbstractMixerConfig
"""The name of a registered mixer, set by the sections of `ModelConfig`, or a configuration."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: what stands where. Layers are counted from 0.

    Example:
      >>> from fwpkm_jax import ModelConfig
      >>> ModelConfig(mixers=("gdn", "swa") * 2, memory_layers=(1, 3)).memory_layers
      (1, 3)
    """

    vocab_size: int = 32_000
    """Tokens of the vocabulary."""
    model_dim: int = 768
    """Width of the residual stream."""
    mixers: tuple[Mixer, ...] = ("gdn", "gdn", "gdn", "swa") * 3
    """Token mixer of each layer: Gated DeltaNet (gdn), sliding-window (swa) or full attention,
    LaCT, Titans' memory alone (titans) or with a window of attention as its context, gate or layer
    (titans_mac, titans_mag, titans_mal), TTT (ttt_linear, ttt_mlp), a matrix memory by its name in
    `rules.matrix`, or a registered mixer of your own; on the command line also the JSON of a
    configuration."""
    mlp_dim: int = 2304
    """Hidden width of the SwiGLU layers."""
    mlp_activation: Activation = "silu"
    """Of the gates in SwiGLU layers and experts."""
    mlp_bias: bool = False
    """Adds biases in SwiGLU layers."""
    memory_layers: tuple[int, ...] = ()
    """Layers with a fast-weight memory before the mixer."""
    pkm_layers: tuple[int, ...] = ()
    """Layers with a product-key memory in place of the MLP."""
    expert_layers: tuple[int, ...] = ()
    """Layers with a mixture of experts in place of the MLP."""
    post_norm_layers: tuple[int, ...] = ()
    """Layers that norm what mixer and MLP add to the residual stream, not what these read."""
    window: int = 512
    """Tokens a sliding-window layer sees, itself included."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Of the attention layers, sliding-window and full."""
    gdn: GatedDeltaNetConfig = field(default_factory=GatedDeltaNetConfig)
    """Of the Gated DeltaNet layers."""
    lact: LaCTConfig = field(default_factory=LaCTConfig)
    """Of the LaCT layers, which have a window of their own."""
    titans: TitansConfig = field(default_factory=TitansConfig)
    """Of the layers with a Titans memory; their attention is `attention`, over `window` tokens, in
    titans_mac over a segment of `titans.chunk_size`."""
    matrix: MatrixMemoryConfig = field(default_factory=MatrixMemoryConfig)
    """Of the layers with a matrix memory."""
    fast_weight: FastWeightConfig = field(default_factory=FastWeightConfig)
    """Of the memory layers."""
    pkm: PKMConfig = field(default_factory=PKMConfig)
    """Of the product-key memory layers."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Of the layers with experts."""
    fast_weight_layer: FastWeightLayerConfig | None = None
    """A layer before the head that takes a gradient step on every token of its sequence; None: the
    head reads the last norm."""
    tie_embeddings: bool = True
    """The head shares the embedding's weights."""
    head_bias: bool = False
    """Adds a bias to the logits."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMS norms."""
    norm_offset: bool = True
    """RMS norms multiply by 1 + weight; off: by weight. Those of queries and keys and of memories
    have options of their own."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    head_init_std: float | None = None
    """Standard deviation of an untied head's initial weights; None: init_std."""
    branch_init_scale: float = 1.0
    """Multiplies the initial weights of the maps that write into the residual stream."""
    activation_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations; memories and logits are float32."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of embedding, head and the matrices of mixers, MLPs and experts. Vectors and all that belongs
    to a memory are float32."""

    def __post_init__(self):
        check_literals(self)
        num_layers = len(self.mixers)
        if num_layers == 0:
            raise ValueError("mixers=() must name at least one layer's token mixer.")
        self.matrix.check_used(self.mixer_configs)
        for name in ("memory_layers", "pkm_layers", "expert_layers", "post_norm_layers"):
            layers = getattr(self, name)
            outside = [layer for layer in layers if not 0 <= layer < num_layers]
            if outside or len(set(layers)) < len(layers):
                raise ValueError(
                    f"{name}={layers} must be distinct layers between 0 and {num_layers - 1}: "
                    f"mixers names {num_layers} layers."
                )
        both = sorted(set(self.pkm_layers) & set(self.expert_layers))
        if both:
            raise ValueError(
                f"pkm_layers and expert_layers share {both}; a layer has one or the other."
            )
        if self.tie_embeddings and self.head_init_std is not None:
            raise ValueError(
                f"head_init_std={self.head_init_std} has no effect with tie_embeddings=True; "
                "set one of them."
            )
        for name in ("vocab_size", "model_dim", "mlp_dim", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("norm_eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        for name in ("head_init_std", "branch_init_scale"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0.")

    @property
    def registered_names(self) -> tuple[tuple[str, str], ...]:
        """The modules that registered the names among `mixers`, each with the name."""
        names = [mixer for mixer in self.mixers if isinstance(mixer, str)]
        return tuple((mixer_module(name), f"The mixer {name!r}") for name in names)

    @property
    def mixer_configs(self) -> tuple[AbstractMixerConfig, ...]:
        """The configuration of each layer's token mixer.

        Raises:
          ValueError: a name is not registered, or the settings of a mixer do not go together.
        """
        configs = []
        for layer, mixer in enumerate(self.mixers):
            if isinstance(mixer, AbstractMixerConfig):
                configs.append(mixer)
            else:
                check_mixer_name(mixer, f"mixers[{layer}]")
                configs.append(mixer_config(mixer, self))
        return tuple(configs)


def own_memory(config: ModelConfig) -> OwnMemory | None:
    """The first mixer's memory that is written in chunks of its own, anew for each sequence."""
    found = (mixer.own_memory for mixer in config.mixer_configs)
    return next((memory for memory in found if memory is not None), None)
