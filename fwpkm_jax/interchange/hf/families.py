"""The families of the transformers library that can be read and written, by their `model_type`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fwpkm_jax.io.untrusted import shown


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one `model_type` have in common."""

    class_name: str
    """The library's class."""
    defaults: Mapping[str, Any]
    """What the library assumes for a key that is not in the file."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Kinds of layers that its code knows."""
    listed_layers: bool = True
    """`layer_types` is read; off: all layers are of one kind."""
    full_every: int | str | None = None
    """Of layers that are not listed, every so many have full attention; or the key that says it."""
    window: Literal["none", "switched", "given"] = "none"
    """Sliding windows: none; of `sliding_window` if `use_sliding_window` says so; of
    `sliding_window`."""
    gated: bool = False
    """Attention has an output gate."""
    biases: Literal["asked", "inputs", "none"] = "asked"
    """Biases of attention: as `attention_bias` says; of queries, keys and values; none."""
    mlp_bias: bool = False
    """`mlp_bias` has an effect."""
    qk_norm: Literal["head", "all", "none"] = "none"
    """Norm of queries and keys."""
    norms: Literal["inputs", "outputs", "attention_outputs", "both"] = "inputs"
    """What layers norm: what they read; what they add; what they add where they have attention,
    else what they read; both."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    partial_rotary: bool = False
    """`partial_rotary_factor` has an effect."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies where the file has none."""
    optional_positions: bool = False
    """A base of null means no positions."""
    window_theta: tuple[str, float] | None = None
    """Layers with a window have rotary settings of their own; key and default of their base."""
    skipped_positions: bool = False
    """`no_rope_layers` has an effect."""
    scaled_embedding: bool = False
    """The embedding's rows are multiplied by the square root of their width."""
    score_dim: bool = False
    """`query_pre_attn_scalar` has an effect."""
    experts: Literal["none", "some", "all"] = "none"
    """Which layers have experts: none; those that the file says; all."""
    shared_expert: bool = True
    """Layers of experts have one more that sees every token."""
    projections: Literal["by_head", "joined", "single"] = "by_head"
    """How Gated DeltaNet's input maps are stored: by key head as here; queries, keys and values
    joined; each by itself."""
    activation_key: str = "hidden_act"
    """Key of the activation function."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value must be null or false, and what another would mean."""


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": None,
}
_WINDOW: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_EXPERTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
_HYBRID = ("linear_attention", "full_attention")
_SLIDING = ("full_attention", "sliding_attention")
_OLMO_2 = Family(
    class_name="Olmo2ForCausalLM",
    qk_norm="all",
    norms="outputs",
    defaults={
        **_COMMON, "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "sliding_window": 4096,
    },
)  # fmt: skip
_QWEN_3 = Family(
    class_name="Qwen3ForCausalLM",
    layer_types=_SLIDING,
    window="switched",
    qk_norm="head",
    defaults={
        **_COMMON, **_WINDOW, "vocab_size": 151936, "hidden_size": 4096,
        "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128,
    },
)  # fmt: skip
_QWEN_3_5 = Family(
    class_name="Qwen3_5ForCausalLM",
    layer_types=_HYBRID,
    full_every="full_attention_interval",
    gated=True,
    qk_norm="head",
    norm_offset=True,
    partial_rotary=True,
    projections="joined",
    defaults={
        **_COMMON, **_DELTA, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "partial_rotary_factor": 0.25,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_next": replace(
        _QWEN_3_5,
        class_name="Qwen3NextForCausalLM",
        projections="by_head",
        experts="some",
        defaults={
            **_QWEN_3_5.defaults, **_EXPERTS, "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 5632, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3_5_moe_text": replace(
        _QWEN_3_5,
        class_name="Qwen3_5MoeForCausalLM",
        experts="all",
        defaults={
            **_QWEN_3_5.defaults, "hidden_size": 2048, "num_hidden_layers": 40,
            "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3": _QWEN_3,
    "qwen3_moe": replace(
        _QWEN_3,
        class_name="Qwen3MoeForCausalLM",
        listed_layers=False,
        experts="some",
        shared_expert=False,
        defaults={
            **_QWEN_3.defaults, **_EXPERTS, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 24, "num_key_value_heads": 4, "head_dim": None,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "olmo2": replace(_OLMO_2, listed_layers=False),
    "olmo3": replace(
        _OLMO_2,
        class_name="Olmo3ForCausalLM",
        layer_types=_SLIDING,
        full_every=4,
        window="given",
        rope_theta=5e5,
        window_theta=("rope_theta", 5e5),
    ),
    "olmo_hybrid": Family(
        class_name="OlmoHybridForCausalLM",
        layer_types=_HYBRID,
        full_every="full_attention_interval",
        qk_norm="all",
        norms="attention_outputs",
        optional_positions=True,
        projections="single",
        defaults={
            **_COMMON, "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 30, "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
            "full_attention_interval": 4,
        },
    ),
    "llama": Family(
        class_name="LlamaForCausalLM",
        listed_layers=False,
        mlp_bias=True,
        defaults={
            **_COMMON, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        },
    ),
    "mistral": Family(
        class_name="MistralForCausalLM",
        layer_types=_SLIDING,
        listed_layers=False,
        window="given",
        biases="none",
        defaults={
            **_COMMON, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072, "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        class_name="Qwen2ForCausalLM",
        layer_types=_SLIDING,
        window="switched",
        biases="inputs",
        defaults={
            **_COMMON, **_WINDOW, "vocab_size": 151936, "hidden_size": 4096,
            "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
    ),
    "smollm3": Family(
        class_name="SmolLM3ForCausalLM",
        layer_types=_SLIDING,
        window="switched",
        mlp_bias=True,
        skipped_positions=True,
        rope_theta=2e6,
        defaults={
            **_COMMON, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "no_rope_layer_interval": 4, "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family(
        class_name="Gemma3ForCausalLM",
        layer_types=_SLIDING,
        full_every="sliding_window_pattern",
        window="given",
        qk_norm="head",
        norms="both",
        norm_offset=True,
        rope_theta=1e6,
        window_theta=("rope_local_base_freq", 1e4),
        scaled_embedding=True,
        score_dim=True,
        activation_key="hidden_activation",
        unknown={
            "use_bidirectional_attention": "tokens that read those after them",
            "final_logit_softcapping": "bounded logits",
        },
        defaults={
            **_COMMON, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072, "sliding_window": 4096,
            "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
"""By `model_type`; those closest to the paper's models first."""

TEXT_PARTS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}
"""Models of text and images by `model_type`, and that of their text part."""


def text_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `config.json` that describes the decoder of text.

    Raises:
      ValueError: `model_type` is not one of a family that can be imported.
    """
    name = values.get("model_type")
    if not isinstance(name, str):
        raise ValueError(f"model_type={shown(repr(name), 60)} must be a name.")
    if name in TEXT_PARTS:
        part = values.get("text_config") or {}
        if not isinstance(part, Mapping):
            raise ValueError(f"text_config={shown(repr(part), 60)} must be an object.")
        part = dict(part)
        part["model_type"] = TEXT_PARTS[name]
        part["architectures"] = [FAMILIES[TEXT_PARTS[name]].class_name]
        for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
            if values.get(key) is not None:
                part[key] = values[key]
        return part
    if name not in FAMILIES:
        raise ValueError(
            f"model_type={shown(name, 60)!r} is none of "
            f"{', '.join(sorted({*FAMILIES, *TEXT_PARTS}))}."
        )
    return dict(values)
