"""The configuration of a model from the `config.json` of its folder.

Keys that the transformers library does not read for a family are ignored; those it reads and this
package has nothing for are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.mixers import AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.layers.rotary import Llama3Scaling, YarnConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.outside_files import shown

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_MIXERS = {"full_attention": "attention", "sliding_attention": "swa", "linear_attention": "gdn"}
_MOST_SIZE = 2**31 - 1  # What devices count in.
_MOST_LAYERS = 10_000  # A name of Python's for each is made before the weights are looked at.
_MOST_EXPERTS = 2**16
_OLMO_GATED_NORM_EPS = 1e-5  # Fixed in the family's code, whatever rms_norm_eps says.


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of one `model_type` have in common."""

    layer_types: tuple[str, ...]
    """Kinds of layers that its code knows."""
    defaults: Mapping[str, Any]
    """What the library assumes for a key that is not in the file."""
    gated: bool = False
    """Attention has an output gate."""
    qk_norm: Literal["head", "all", "none"] = "none"
    """Norm of queries and keys."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    partial_rotary: bool = False
    """`partial_rotary_factor` has an effect."""
    experts: bool = False
    """Layers may have experts."""
    projections: Literal["by_head", "joined", "single"] = "by_head"
    """How Gated DeltaNet's input maps are stored: by key head as here; queries, keys and values
    joined; each by itself."""
    post_norm_attention: bool = False
    """Layers with attention norm what they add; layers without it what they read."""


_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": None,
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
_QWEN_NEXT = Family(
    layer_types=_HYBRID,
    gated=True,
    qk_norm="head",
    norm_offset=True,
    partial_rotary=True,
    experts=True,
    defaults={
        **_COMMON, **_DELTA, **_EXPERTS, "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)  # fmt: skip
_QWEN_3_5 = Family(
    layer_types=_HYBRID,
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
    "llama": Family(
        layer_types=("full_attention",),
        defaults={
            **_COMMON, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        },
    ),
    "qwen3": Family(
        layer_types=("full_attention", "sliding_attention"),
        qk_norm="head",
        defaults={
            **_COMMON, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "head_dim": 128, "use_sliding_window": False, "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_next": _QWEN_NEXT,
    "olmo_hybrid": Family(
        layer_types=_HYBRID,
        qk_norm="all",
        projections="single",
        post_norm_attention=True,
        defaults={
            **_COMMON, "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 30, "max_position_embeddings": 65536,
            "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
            "full_attention_interval": 4,
        },
    ),
}  # fmt: skip
"""By `model_type`."""

TEXT_PARTS = {"qwen3_5": "qwen3_5_text"}
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
        part["architectures"] = ["Qwen3_5ForCausalLM"]
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


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` describes, with float32 parameters.

    Raises:
      ValueError: it asks for something that this package has not, named with its key.
    """
    return _Reader(text_config(values)).model()


class _Reader:
    """The keys of one file, with the family's defaults."""

    def __init__(self, values: dict[str, Any]):
        self.family = FAMILIES[values["model_type"]]
        self._values = values
        if values.get("quantization_config"):
            raise ValueError(
                "quantization_config: quantised weights cannot be read; import the model they "
                "were made from."
            )

    def get(self, key: str) -> Any:
        """A key's value; None in a file stands for the default where there is one."""
        value = self._values.get(key)
        return self.family.defaults.get(key) if value is None else value

    def count(self, key: str, *, least: int = 1, most: int = _MOST_SIZE) -> int:
        """The value of a key that must have one, as an integer."""
        return _count(self.get(key), key, least=least, most=most)

    def optional_count(self, key: str) -> int | None:
        """The value of a key that may be missing, null or zero, each of which means None."""
        value = self.get(key)
        return _count(value, key, least=0) or None if value is not None else None

    def flag(self, key: str) -> bool:
        """The value of a key that is true or false; a missing one is false."""
        value = self.get(key)
        if value not in (None, True, False):
            raise ValueError(f"{key}={shown(repr(value), 60)} must be true or false.")
        return bool(value)

    def model(self) -> ModelConfig:
        activation = self.get("hidden_act")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ValueError(
                f"hidden_act={shown(repr(activation), 60)} is none of "
                f"{', '.join(sorted(_ACTIVATIONS))}."
            )
        if self.get("attn_output_gate") is False and self.family.gated:
            raise ValueError("attn_output_gate=False: the family's attention has a gate.")
        layer_types = self._layer_types()
        slides, window = self.flag("use_sliding_window"), self.optional_count("sliding_window")
        if "sliding_attention" in layer_types and not (slides and window):
            raise ValueError(
                f"layer_types has sliding_attention, but use_sliding_window={slides} and "
                f"sliding_window={window} give no window."
            )
        expert_layers = self._expert_layers(len(layer_types))
        attention = [i for i, kind in enumerate(layer_types) if kind != "linear_attention"]
        delta = "linear_attention" in self.family.layer_types
        return ModelConfig(
            vocab_size=self.count("vocab_size"),
            model_dim=self.count("hidden_size"),
            mixers=tuple(_MIXERS[kind] for kind in layer_types),
            mlp_dim=self.count("intermediate_size"),
            mlp_activation=_ACTIVATIONS[activation],
            # Of these families' code only Llama's asks for it.
            mlp_bias=self._values["model_type"] == "llama" and self.flag("mlp_bias"),
            expert_layers=expert_layers,
            experts=self._experts() if expert_layers else ExpertsConfig(),
            post_norm_layers=tuple(attention) if self.family.post_norm_attention else (),
            window=window if window and "sliding_attention" in layer_types else 512,
            attention=self._attention(),
            gdn=self._delta(_ACTIVATIONS[activation]) if delta else GatedDeltaNetConfig(),
            tie_embeddings=self.flag("tie_word_embeddings"),
            norm_eps=_real(self.get("rms_norm_eps"), "rms_norm_eps"),
            norm_offset=self.family.norm_offset,
        )

    def _layer_types(self) -> list[str]:
        number = self.count("num_hidden_layers", most=_MOST_LAYERS)
        kinds = self._values.get("layer_types")
        if kinds is not None and not (
            isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        ):
            raise ValueError(f"layer_types={shown(repr(kinds), 60)} must be a list of names.")
        if self.family.layer_types == ("full_attention",):
            kinds = ["full_attention"] * number
        elif kinds is None:
            kinds = self._default_layer_types(number)
        unknown = sorted(set(kinds) - set(self.family.layer_types))
        if unknown:
            raise ValueError(
                f"layer_types holds {shown(unknown[0], 60)!r}; a {self._values['model_type']} has "
                f"{' and '.join(self.family.layer_types)}."
            )
        if len(kinds) != number:
            raise ValueError(
                f"layer_types names {len(kinds)} layers, num_hidden_layers={number}; the file "
                "contradicts itself."
            )
        return list(kinds)

    def _default_layer_types(self, number: int) -> list[str]:
        if "sliding_attention" in self.family.layer_types:
            first = self.count("max_window_layers", least=0)
            slides = self.flag("use_sliding_window") and self.optional_count("sliding_window")
            return [
                "sliding_attention" if slides and i >= first else "full_attention"
                for i in range(number)
            ]
        every = self.count("full_attention_interval")
        kinds = [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(number)
        ]
        if self.family.post_norm_attention and "full_attention" not in kinds:
            kinds[-1] = "full_attention"  # As OLMo-Hybrid's code does for few layers.
        return kinds

    def _attention(self) -> AttentionConfig:
        heads = self.count("num_attention_heads")
        head_dim = self.optional_count("head_dim") or self.count("hidden_size") // heads
        return AttentionConfig(
            num_heads=heads,
            num_kv_heads=self.optional_count("num_key_value_heads") or heads,
            head_dim=head_dim,
            gated=self.family.gated,
            qk_norm=self.family.qk_norm,
            norm_offset=self.family.norm_offset,
            bias=self.flag("attention_bias"),
            **self._rotary(),
        )

    def _rotary(self) -> dict[str, Any]:
        """The settings of `AttentionConfig` that turn queries and keys."""
        old = self._values.get("rope_scaling")
        key = "rope_scaling" if old else "rope_parameters"
        rope = self._values.get(key) or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"{key}={shown(repr(rope), 60)} must be an object.")
        rope = dict(rope)
        nested = sorted(name for name in rope if name in _MIXERS)
        if nested:
            raise ValueError(
                f"{key} has an entry for {nested[0]}; positions that differ by layer are not known."
            )
        rope.setdefault("rope_theta", self._values.get("rope_theta", 10_000.0))
        rope.setdefault("partial_rotary_factor", self.get("partial_rotary_factor"))
        share = rope["partial_rotary_factor"]
        share = 1.0 if share is None else share
        if rope["rope_theta"] is None:
            return {"rotary_fraction": 0.0}  # OLMo-Hybrid without positions.
        if share != 1 and not self.family.partial_rotary:
            raise ValueError(
                f"partial_rotary_factor={shown(repr(share), 60)} has no meaning in a "
                f"{self._values['model_type']}."
            )
        settings = {
            "rotary_fraction": _real(share, f"{key}.partial_rotary_factor"),
            "rope_theta": _real(rope["rope_theta"], f"{key}.rope_theta"),
        }
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind in ("default", "mrope"):  # Three equal positions turn like one.
            return settings
        if kind not in ("linear", "llama3", "yarn"):
            raise ValueError(
                f"{key}: rope_type={shown(repr(kind), 60)} is none of default, linear, llama3 and "
                "yarn."
            )
        if kind == "linear":
            return {**settings, "linear_scaling": self._rope_value(rope, key, "factor")}
        original = self._values.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings")
        original = original or self.get("max_position_embeddings")
        original = _count(original, "max_position_embeddings")
        if kind == "llama3":
            values = ("factor", "low_freq_factor", "high_freq_factor")
            numbers = {name: self._rope_value(rope, key, name) for name in values}
            return {**settings, "llama3": Llama3Scaling(original_length=original, **numbers)}
        return {**settings, "yarn": self._yarn(rope, original)}

    def _yarn(self, rope: Mapping[str, Any], original: int) -> YarnConfig:

        def real(name: str) -> float | None:
            value = rope.get(name)
            return None if value is None else _real(value, name)

        factor = real("factor")
        factor = self.count("max_position_embeddings") / original if factor is None else factor
        attention_factor = real("attention_factor")
        mscale, mscale_all = real("mscale"), real("mscale_all_dim")
        if attention_factor is None and mscale and mscale_all:
            attention_factor = 1.0
            if factor > 1:
                log = 0.1 * math.log(factor)
                attention_factor = (mscale * log + 1) / (mscale_all * log + 1)
        truncate = rope.get("truncate")
        return YarnConfig(
            factor=factor,
            original_length=original,
            beta_fast=real("beta_fast") or 32.0,
            beta_slow=real("beta_slow") or 1.0,
            attention_factor=attention_factor,
            truncate=True if truncate is None else bool(truncate),
        )

    def _rope_value(self, rope: Mapping[str, Any], key: str, name: str) -> float:
        if rope.get(name) is None:
            raise ValueError(f"{key} has no {name}, which rope_type={rope.get('rope_type')} needs.")
        return _real(rope[name], f"{key}.{name}")

    def _delta(self, activation: Activation) -> GatedDeltaNetConfig:
        olmo = self.family.projections == "single"
        heads = self.count("num_attention_heads")
        key_heads = self.optional_count("linear_num_key_heads") or heads
        value_heads = self.optional_count("linear_num_value_heads") or heads
        key_dim = self.optional_count("linear_key_head_dim")
        key_dim = key_dim or int(0.75 * self.count("hidden_size") / key_heads)
        return GatedDeltaNetConfig(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=key_dim,
            value_head_dim=self.optional_count("linear_value_head_dim") or 2 * key_dim,
            conv_width=self.count("linear_conv_kernel_dim"),
            max_strength=2.0 if olmo and self.flag("linear_allow_neg_eigval") else 1.0,
            activation=activation,
            norm_eps=_OLMO_GATED_NORM_EPS if olmo else None,
        )

    def _expert_layers(self, number: int) -> tuple[int, ...]:
        if not self.family.experts or not self.optional_count("num_experts"):
            return ()
        dense, every = self.get("mlp_only_layers") or [], self.count("decoder_sparse_step")
        if not isinstance(dense, list) or len(dense) > _MOST_LAYERS:
            raise ValueError(f"mlp_only_layers={shown(repr(dense), 60)} must be a list of layers.")
        return tuple(i for i in range(number) if i not in dense and (i + 1) % every == 0)

    def _experts(self) -> ExpertsConfig:
        return ExpertsConfig(
            num_experts=self.count("num_experts", most=_MOST_EXPERTS),
            top_k=self.count("num_experts_per_tok"),
            hidden_dim=self.count("moe_intermediate_size"),
            shared_dim=self.count("shared_expert_intermediate_size"),
            renormalize=self.flag("norm_topk_prob"),
            balance_weight=_real(self.get("router_aux_loss_coef"), "router_aux_loss_coef"),
        )


def _count(value: Any, key: str, *, least: int = 1, most: int = _MOST_SIZE) -> int:
    """An integer of a file, within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{key}={shown(repr(value), 60)} must be an integer from {least} to {most}."
        )
    return value


def _real(value: Any, key: str) -> float:
    """A number of a file that is finite in float32."""
    if type(value) not in (int, float) or not abs(value) < 3e38:
        raise ValueError(f"{key}={shown(repr(value), 60)} must be a finite number.")
    return float(value)
