"""The `config.json` of a model: what a family's code must be told to compute the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fwpkm_jax.config_json import to_json
from fwpkm_jax.interchange.hf.families import FAMILIES, Family, model_config
from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    MatrixMemoryConfig,
    TitansConfig,
)
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.layers.rotary import YarnConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.runs.run_directory import differences

_CLASSES = {
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "llama": "LlamaForCausalLM",
}
"""The library's class by `model_type`; families that are closest to the paper's models first."""
_ACTIVATIONS: Mapping[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_LAYER_TYPES = {
    "attention": "full_attention",
    "swa": "sliding_attention",
    "gdn": "linear_attention",
}


def config_text(model: ModelConfig, *, context: int) -> dict[str, Any]:
    """The `config.json` of the first family that computes what the model does without memories.

    Args:
      model: the model.
      context: tokens that it was trained on at once, `max_position_embeddings`.

    Raises:
      ValueError: no family computes the same; the message names what is closest, and why not.
    """
    reasons: dict[str, list[str]] = {}
    for model_type in _CLASSES:
        text = _text(model, model_type, context)
        try:
            read = model_config(text)
        except ValueError as error:
            reasons[model_type] = [str(error).rstrip(".")]
            continue
        reasons[model_type] = changes(read, model)
        if not reasons[model_type]:
            return text
    kinds = {_LAYER_TYPES.get(name, name) for name in map(_name, model.mixers)}

    def distance(model_type: str) -> tuple[int, int]:
        return len(kinds - {*FAMILIES[model_type].layer_types}), len(reasons[model_type])

    nearest = min(reasons, key=distance)
    raise ValueError(
        f"no family of the transformers library computes what this model does; in a {nearest}, "
        f"the closest: {reasons[nearest][0]}."
    )


def changes(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Where two models compute something else, memories and low-rank updates aside."""
    return differences(_computed(one), _computed(other), "model")


def _computed(config: ModelConfig) -> dict[str, Any]:
    """Its fields, without those that change nothing but the first weights, speed and rounding."""
    kinds = {_LAYER_TYPES.get(name) for name in map(_name, config.mixers)}
    attention, gdn, experts = config.attention, config.gdn, config.experts
    plain = dataclasses.replace(
        config,
        memory_layers=(),
        fast_weight=FastWeightConfig(),
        lora=None,  # Is merged.
        init_std=0.02,
        head_init_std=None,
        branch_init_scale=1.0,
        activation_dtype="float32",
        parameter_dtype="float32",
        window=config.window if "sliding_attention" in kinds else 512,
        attention=dataclasses.replace(attention, backend="auto")
        if kinds & {"full_attention", "sliding_attention"}
        else AttentionConfig(),
        gdn=dataclasses.replace(gdn, backend="auto", chunk_size=64, decay_start="constant")
        if "linear_attention" in kinds
        else GatedDeltaNetConfig(),
        experts=dataclasses.replace(experts, balance_weight=0.0)
        if config.expert_layers
        else ExpertsConfig(),
        pkm=config.pkm if config.pkm_layers else PKMConfig(),
    )
    sections = {"lact": LaCTConfig(), "titans": TitansConfig(), "matrix": MatrixMemoryConfig()}
    known = None not in kinds
    return to_json(dataclasses.replace(plain, **sections) if known else plain)


def _text(model: ModelConfig, model_type: str, context: int) -> dict[str, Any]:
    """What a family's file would say of the model; it may not fit the family."""
    family, attention = FAMILIES[model_type], model.attention
    kinds = [_LAYER_TYPES.get(mixer, mixer) for mixer in map(_name, model.mixers)]
    values: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": len(model.mixers),
        "hidden_act": _ACTIVATIONS[model.mlp_activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": context,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.bias,
        "rope_parameters": _rope(model, family),
        "dtype": model.parameter_dtype,
    }
    if model_type == "llama":
        return values | {"mlp_bias": model.mlp_bias}
    values["layer_types"] = kinds
    if "sliding_attention" in kinds:
        values |= {"use_sliding_window": True, "sliding_window": model.window}
    if "linear_attention" in family.layer_types:
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
    if family.experts:
        values |= _experts(model)
    return values


def _name(mixer: Any) -> str:
    return mixer if isinstance(mixer, str) else type(mixer).__name__


def _rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    attention = model.attention
    if attention.rotary_fraction == 0 and not family.partial_rotary:
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


def _experts(model: ModelConfig) -> dict[str, Any]:
    if not model.expert_layers:
        return {"num_experts": 0}
    experts = model.experts
    dense = [i for i in range(len(model.mixers)) if i not in model.expert_layers]
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.hidden_dim,
        "shared_expert_intermediate_size": experts.shared_dim,
        "norm_topk_prob": experts.renormalize,
        "router_aux_loss_coef": experts.balance_weight,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
