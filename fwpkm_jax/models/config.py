"""The configuration of a decoder: which layers it has, and their settings."""

from dataclasses import dataclass, field
from typing import Literal

from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.lora import LoRAConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import (
    AbstractMixerConfig,
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    MatrixMemoryConfig,
    MixerMemory,
    TitansConfig,
)
from fwpkm_jax.layers.mixers.registry import check_mixer_name, mixer_config, mixer_module
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.literals import Count, NotNegative, Positive, check_fields

Mixer = str | AbstractMixerConfig
"""A mixer's configuration, or its registered name; then `ModelConfig` has the settings."""
Norms = Literal["inputs", "outputs", "both"]
"""What a layer normalises: what mixer and MLP read, what they add, or both."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The layout of a decoder and the settings of its layers. Layers are counted from 0.

    Example:
      >>> from fwpkm_jax import ModelConfig
      >>> ModelConfig(mixers=("gdn", "swa") * 2, memory_layers=(1, 3)).memory_layers
      (1, 3)
    """

    vocab_size: Count = 32_000
    """Number of tokens in the vocabulary."""
    model_dim: Count = 768
    """Width of the residual stream."""
    mixers: tuple[Mixer, ...] = ("gdn", "gdn", "gdn", "swa") * 3
    """Token mixer of each layer: Gated DeltaNet (gdn), sliding-window (swa) or full attention
    (attention), LaCT (lact), Titans' memory without attention (titans) or with it, as a context, a
    gate or a layer (titans_mac, titans_mag, titans_mal), TTT (ttt_linear, ttt_mlp, in_place_ttt), a
    matrix memory by its name in `rules.matrix`, or a mixer that you registered. On the command line
    also the JSON of a configuration."""
    mlp_dim: Count = 2304
    """Hidden width of the SwiGLU layers."""
    mlp_activation: Activation = "silu"
    """Activation function of the gates in SwiGLU layers and experts."""
    mlp_bias: bool = False
    """Adds biases in SwiGLU layers."""
    memory_layers: tuple[int, ...] = ()
    """Layers with a fast-weight memory before the mixer."""
    memory_mixer: AbstractMixerConfig | None = None
    """A token mixer with a window, whose output only the memories of `memory_layers` read, added to
    the residual stream: what a token looks up and stores then depends on the words before it, and
    the stream does not change. On the command line the JSON of a configuration. None: memories read
    the stream alone."""
    pkm_layers: tuple[int, ...] = ()
    """Layers with a product-key memory in place of the MLP."""
    expert_layers: tuple[int, ...] = ()
    """Layers with a mixture of experts in place of the MLP."""
    post_norm_layers: tuple[int, ...] = ()
    """Layers that normalise the outputs of mixer and MLP instead of their inputs."""
    sandwich_norm_layers: tuple[int, ...] = ()
    """Layers that normalise the inputs and the outputs of mixer and MLP."""
    window: Count = 512
    """Tokens a sliding-window layer sees, itself included."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    """Settings of the attention layers, sliding-window and full."""
    gdn: GatedDeltaNetConfig = field(default_factory=GatedDeltaNetConfig)
    """Settings of the Gated DeltaNet layers."""
    lact: LaCTConfig = field(default_factory=LaCTConfig)
    """Settings of the LaCT layers; they use `lact.window`, not `window`."""
    titans: TitansConfig = field(default_factory=TitansConfig)
    """Settings of the Titans layers. Their attention has the settings in `attention`; it sees
    `window` tokens, or in titans_mac a segment of `titans.chunk_size` tokens."""
    matrix: MatrixMemoryConfig = field(default_factory=MatrixMemoryConfig)
    """Settings of the layers with a matrix memory."""
    fast_weight: FastWeightConfig = field(default_factory=FastWeightConfig)
    """Settings of the fast-weight memories in `memory_layers`."""
    pkm: PKMConfig = field(default_factory=PKMConfig)
    """Settings of the product-key memories in `pkm_layers`."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    """Settings of the experts in `expert_layers`."""
    fast_weight_layer: FastWeightLayerConfig | None = None
    """Settings of a Fast Weight Layer before the head, which takes a gradient step on every token
    of its sequence. None: there is no such layer."""
    lora: LoRAConfig | None = None
    """Low-rank updates of linear maps. None: there are none."""
    embedding_scale: Positive = 1.0
    """Multiplies the embedding's rows; a head that shares them reads them as they are."""
    tie_embeddings: bool = True
    """The head shares the embedding's weights."""
    head_bias: bool = False
    """Adds a bias to the logits."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in RMS norms."""
    norm_offset: bool = True
    """True: RMS norms multiply by 1 + weight. False: by weight. Norms of queries and keys and norms
    in memories have separate options."""
    init_std: Positive = 0.02
    """Standard deviation of initial weights."""
    head_init_std: NotNegative | None = None
    """Standard deviation of an untied head's initial weights; None: init_std."""
    branch_init_scale: NotNegative = 1.0
    """Multiplies the initial weights of the linear maps whose outputs enter the residual stream."""
    activation_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """dtype of activations; memories and logits are float32."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which embedding, head and the matrices and convolutions of mixers, MLPs and experts
    are stored where they do not train, see `OptimizerConfig.precision`. Other parameters and all
    of memories are float32."""

    def __post_init__(self):
        check_fields(self)
        num_layers = len(self.mixers)
        if num_layers == 0:
            raise ValueError("mixers=() must name at least one layer's token mixer.")
        self.matrix.check_used(self.mixer_configs)
        kinds = ("memory", "pkm", "expert", "post_norm", "sandwich_norm")
        for name in (f"{kind}_layers" for kind in kinds):
            layers = getattr(self, name)
            outside = [layer for layer in layers if not 0 <= layer < num_layers]
            if outside or len(set(layers)) < len(layers):
                raise ValueError(
                    f"{name}={layers} must be distinct layers between 0 and {num_layers - 1}: "
                    f"mixers names {num_layers} layers."
                )
        for one, other in (
            ("pkm_layers", "expert_layers"),
            ("post_norm_layers", "sandwich_norm_layers"),
        ):
            both = sorted({*getattr(self, one)} & {*getattr(self, other)})
            if both:
                raise ValueError(f"{one} and {other} share {both}; a layer has one or the other.")
        if self.tie_embeddings and self.head_init_std is not None:
            raise ValueError(
                f"head_init_std={self.head_init_std} has no effect with tie_embeddings=True; "
                "set one of them."
            )
        if (mixer := self.memory_mixer) is not None:
            if not self.memory_layers:
                raise ValueError("memory_mixer needs memory_layers; name some, or leave it out.")
            if mixer.receptive_field is None:
                raise ValueError(
                    f"memory_mixer={mixer} sees all tokens before; give it a window, so that what "
                    "a stream keeps has a bound."
                )

    def norms_of(self, layer: int) -> Norms:
        """What a layer normalises."""
        if layer in self.post_norm_layers:
            return "outputs"
        return "both" if layer in self.sandwich_norm_layers else "inputs"

    @property
    def registered_names(self) -> tuple[tuple[str, str], ...]:
        """Pairs of module and description: where each name in `mixers` was registered."""
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


def mixer_memory(config: ModelConfig) -> MixerMemory | None:
    """The `mixer_memory` of the first mixer that has one, or None.

    Such a memory has its own chunk size and starts again with each sequence.
    """
    found = (mixer.mixer_memory for mixer in config.mixer_configs)
    return next((memory for memory in found if memory is not None), None)
