"""The `config.json` of a model: what a family's code must be told to compute the same."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from fwpkm_jax.config_json import to_json
from fwpkm_jax.interchange.hf.families import FAMILIES, Family
from fwpkm_jax.interchange.hf.rope import DELTA, FULL, WINDOW
from fwpkm_jax.interchange.hf.settings import model_config
from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import (
    AbstractMixerConfig,
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    MatrixMemoryConfig,
    TitansConfig,
)
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.layers.rotary import YarnConfig
from fwpkm_jax.models.config import Mixer, ModelConfig
from fwpkm_jax.training.runs.run_directory import differences

_ACTIVATIONS: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}


class _Layers(NamedTuple):
    """A model's token mixers as a family would describe them.

    Attributes:
      kinds: the library's name of each layer's kind, or what the mixer is called here.
      full: settings of full attention; those of a window's layers, or the model's, without any.
      window: settings of attention with a window; those of `full` without any.
      configs: settings of each layer's mixer.
    """

    kinds: list[str]
    full: AttentionConfig
    window: AttentionConfig
    configs: tuple[AbstractMixerConfig, ...]

    @staticmethod
    def of(model: ModelConfig) -> "_Layers":
        configs, kinds = model.mixer_configs, []
        for mixer, config in zip(model.mixers, configs, strict=True):
            if isinstance(config, AttentionConfig):
                kinds.append(FULL if config.window is None else WINDOW)
            elif isinstance(config, GatedDeltaNetConfig):
                kinds.append(DELTA)
            else:
                kinds.append(mixer if isinstance(mixer, str) else type(mixer).__name__)
        attention = [config for config in configs if isinstance(config, AttentionConfig)]
        attention.sort(key=lambda config: config.rotary_fraction == 0)  # Those with positions.
        full = next((x for x in attention if x.window is None), None)
        window = next((x for x in attention if x.window is not None), None)
        full = full or window or model.attention
        return _Layers(kinds, full, window or full, configs)


def config_text(model: ModelConfig, *, context: int) -> dict[str, Any]:
    """The `config.json` of the first family that computes what the model does without memories.

    Raises:
      ValueError: no family computes the same; the message names what is closest, and why not.
    """
    reasons: dict[str, list[str]] = {}
    for model_type in FAMILIES:
        text = _text(model, model_type, context)
        try:
            read = model_config(text)
        except ValueError as error:
            reasons[model_type] = [str(error).rstrip(".")]
            continue
        reasons[model_type] = changes(read, model)
        if not reasons[model_type]:
            return text
    kinds = {*_Layers.of(model).kinds}

    def distance(model_type: str) -> tuple[int, int]:
        return len(kinds - {*FAMILIES[model_type].layer_types}), len(reasons[model_type])

    nearest = min(reasons, key=distance)
    raise ValueError(
        f"no family of the transformers library computes what this model does; in a {nearest}, "
        f"the closest: {reasons[nearest][0]}. `fwpkm export RUN FOLDER` writes weights for this "
        "package."
    )


def changes(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Where two models compute something else, memories and low-rank updates aside."""
    return differences(_computed(one), _computed(other), "model")


def _computed(config: ModelConfig) -> dict[str, Any]:
    """Its fields, without those that change nothing but the first weights, speed and rounding."""
    layers = _Layers.of(config)
    attention, window, mixers = _attention(layers, config)
    experts, kinds = config.experts, {*layers.kinds}
    gdn = dataclasses.replace(config.gdn, backend="auto", chunk_size=64, decay_start="constant")
    dense = len({*config.expert_layers, *config.pkm_layers}) < len(mixers)
    plain = dataclasses.replace(
        config,
        mixers=mixers,
        memory_layers=(),
        fast_weight=FastWeightConfig(),
        lora=None,  # Is merged.
        init_std=0.02,
        head_init_std=None,
        branch_init_scale=1.0,
        activation_dtype="float32",
        parameter_dtype="float32",
        window=window,
        attention=attention,
        gdn=gdn if DELTA in kinds else GatedDeltaNetConfig(),
        mlp_dim=config.mlp_dim if dense else 1,
        experts=dataclasses.replace(experts, balance_weight=0.0)
        if config.expert_layers
        else ExpertsConfig(),
        pkm=config.pkm if config.pkm_layers else PKMConfig(),
    )
    sections = {"lact": LaCTConfig(), "titans": TitansConfig(), "matrix": MatrixMemoryConfig()}
    known = kinds <= {FULL, WINDOW, DELTA}
    return to_json(dataclasses.replace(plain, **sections) if known else plain)


def _attention(
    layers: _Layers, config: ModelConfig
) -> tuple[AttentionConfig, int, tuple[Mixer, ...]]:
    """Settings of attention, the window and all mixers, equal for models that compute the same."""
    if not {FULL, WINDOW} & {*layers.kinds}:
        return AttentionConfig(), 512, config.mixers
    shared = dataclasses.replace(_plain(layers.full), window=None)
    window, mixers = layers.window.window or 512, []
    for mixer, settings in zip(config.mixers, layers.configs, strict=True):
        if isinstance(settings, AttentionConfig):
            plain = _plain(settings)
            named = {None: "attention", window: "swa"}.get(plain.window)
            same = named and dataclasses.replace(plain, window=None) == shared
            mixers.append(named if same else plain)
        else:
            mixers.append(mixer)
    return shared, window, tuple(mixers)


def _plain(attention: AttentionConfig) -> AttentionConfig:
    """Settings without those that change nothing in the result."""
    output_bias, score_dim = attention.has_output_bias, attention.score_dim
    plain = dataclasses.replace(
        attention,
        backend="auto",
        output_bias=None if output_bias == attention.bias else output_bias,
        score_dim=None if score_dim == attention.head_dim else score_dim,
    )
    if plain.rotary_dim:
        return plain
    default = AttentionConfig().rope_theta
    return dataclasses.replace(
        plain, rope_theta=default, yarn=None, llama3=None, linear_scaling=None
    )


def _text(model: ModelConfig, model_type: str, context: int) -> dict[str, Any]:
    """What a family's file would say of the model; it may not fit the family."""
    family, layers = FAMILIES[model_type], _Layers.of(model)
    attention, window = layers.full, layers.window
    values: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": len(layers.kinds),
        family.activation_key: _ACTIVATIONS[model.mlp_activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": context,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": _rope(attention, family),
        "dtype": model.parameter_dtype,
        # Without these a family takes the tokens of its own tokenizer.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if family.window_theta is not None:
        values["rope_parameters"] = {FULL: _rope(attention, family), WINDOW: _rope(window, family)}
    if family.experts != "all":
        values["intermediate_size"] = model.mlp_dim
    if family.biases == "asked":
        values["attention_bias"] = attention.bias
    if family.mlp_bias:
        values["mlp_bias"] = model.mlp_bias
    if family.listed_layers:
        values["layer_types"] = layers.kinds
    if family.window == "given":
        values["sliding_window"] = window.window
    elif family.window == "switched" and WINDOW in layers.kinds:
        values |= {"use_sliding_window": True, "sliding_window": window.window}
    if family.skipped_positions:
        turning = (getattr(config, "rotary_dim", 1) for config in layers.configs)
        values["no_rope_layers"] = [int(dim > 0) for dim in turning]
    if family.score_dim:
        values["query_pre_attn_scalar"] = attention.score_dim or attention.head_dim
    if DELTA in family.layer_types:
        gdn = model.gdn
        values |= {
            "linear_num_key_heads": gdn.num_key_heads,
            "linear_num_value_heads": gdn.num_value_heads,
            "linear_key_head_dim": gdn.key_head_dim,
            "linear_value_head_dim": gdn.value_head_dim,
            "linear_conv_kernel_dim": gdn.conv_width,
        }
        if family.projections == "single":
            values["linear_allow_neg_eigval"] = gdn.max_strength == 2.0
    if family.experts != "none":
        values |= _experts(model, family)
    return values


def _rope(attention: AttentionConfig, family: Family) -> dict[str, Any]:
    if attention.rotary_fraction == 0 and family.optional_positions:
        return {"rope_theta": None}
    rope: dict[str, Any] = {"rope_theta": attention.rope_theta, "rope_type": "default"}
    if family.partial_rotary or attention.rotary_fraction != 1:
        rope["partial_rotary_factor"] = attention.rotary_fraction
    if attention.linear_scaling is not None:
        return rope | {"rope_type": "linear", "factor": attention.linear_scaling}
    scaling = attention.llama3 or attention.yarn
    if scaling is None:
        return rope
    values = dataclasses.asdict(scaling)
    values["original_max_position_embeddings"] = values.pop("original_length")
    return rope | values | {"rope_type": "yarn" if isinstance(scaling, YarnConfig) else "llama3"}


def _experts(model: ModelConfig, family: Family) -> dict[str, Any]:
    experts = model.experts
    values = {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "router_aux_loss_coef": experts.balance_weight,
    }
    if family.shared_expert:
        values["shared_expert_intermediate_size"] = experts.shared_dim
    if family.experts == "all":
        return values
    if not model.expert_layers:
        return {"num_experts": 0}
    dense = [i for i in range(len(model.mixers)) if i not in model.expert_layers]
    return values | {
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
