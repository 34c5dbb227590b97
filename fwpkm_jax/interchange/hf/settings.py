"""The configuration of a model from the `config.json` of its folder.

Keys that the transformers library does not read for a family are ignored; those it reads and this
package has nothing for are refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fwpkm_jax.interchange.hf.families import FAMILIES, Family, text_config
from fwpkm_jax.interchange.hf.rope import DELTA, FULL, NO_POSITIONS, WINDOW, rotary
from fwpkm_jax.interchange.values import Values
from fwpkm_jax.io.untrusted import shown
from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.layers.mixers import AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.layers.mlp import Activation
from fwpkm_jax.models.config import Mixer, ModelConfig

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_MOST_LAYERS = 10_000  # A name of Python's for each is made before the weights are looked at.
_MOST_EXPERTS = 2**16
_OLMO_GATED_NORM_EPS = 1e-5  # Fixed in the family's code, whatever rms_norm_eps says.


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` describes, with float32 parameters.

    Raises:
      ValueError: it asks for something that this package has not, named with its key.
    """
    text = text_config(values)
    return family_config(text, FAMILIES[text["model_type"]])


def family_config(values: Mapping[str, Any], family: Family) -> ModelConfig:
    """`model_config` of a file whose family is known."""
    return _Reader(values, family).model()


class _Reader(Values):
    """The keys of one file, with the family's defaults."""

    def __init__(self, values: Mapping[str, Any], family: Family):
        self.model_type, self.family = values["model_type"], family
        if values.get("num_experts") is None and "num_local_experts" in values:
            values = {**values, "num_experts": values["num_local_experts"]}  # Two names of one key.
        super().__init__(values, self.family.defaults)
        if values.get("quantization_config"):
            raise ValueError(
                "quantization_config: quantised weights cannot be read; import the model they "
                "were made from."
            )
        for key, meaning in self.family.unknown.items():
            if values.get(key):
                raise ValueError(
                    f"{key}={shown(repr(values[key]), 60)}: this package has no {meaning}."
                )
        if self.get("attn_output_gate") is False and self.family.gated:
            raise ValueError("attn_output_gate=False: the family's attention has a gate.")

    def model(self) -> ModelConfig:
        family, activation = self.family, self._activation()
        kinds, window = self._layer_types(), self._window()
        if WINDOW in kinds and window is None:
            said = None if self.is_null("sliding_window") else self.get("sliding_window")
            switch = ""
            if family.window == "switched":
                switch = f"use_sliding_window={self.flag('use_sliding_window')} and "
            raise ValueError(
                f"layer_types has {WINDOW}, but {switch}sliding_window={said} give no window."
            )
        expert_layers = self._expert_layers(len(kinds))
        experts = self._experts() if expert_layers else ExpertsConfig()
        every = tuple(range(len(kinds)))
        post_norm = {
            "outputs": every,
            "attention_outputs": tuple(i for i in every if kinds[i] != DELTA),
        }
        only_experts = family.experts == "all"
        full, mixers = self._mixers(kinds, window)
        return ModelConfig(
            vocab_size=self.count("vocab_size"),
            model_dim=self.count("hidden_size"),
            mixers=mixers,
            mlp_dim=experts.hidden_dim if only_experts else self.count("intermediate_size"),
            mlp_activation=activation,
            mlp_bias=family.mlp_bias and self.flag("mlp_bias"),
            expert_layers=expert_layers,
            experts=experts,
            post_norm_layers=post_norm.get(family.norms, ()),
            sandwich_norm_layers=every if family.norms == "both" else (),
            window=window if window and WINDOW in kinds else 512,
            attention=full,
            gdn=self._delta(activation) if DELTA in family.layer_types else GatedDeltaNetConfig(),
            embedding_scale=self.count("hidden_size") ** 0.5 if family.scaled_embedding else 1.0,
            tie_embeddings=self.flag("tie_word_embeddings"),
            norm_eps=self.real("rms_norm_eps"),
            norm_offset=family.norm_offset,
        )

    def _activation(self) -> Activation:
        key = self.family.activation_key
        activation = self.get(key)
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ValueError(
                f"{key}={shown(repr(activation), 60)} is none of {', '.join(sorted(_ACTIVATIONS))}."
            )
        return _ACTIVATIONS[activation]

    def _layer_types(self) -> list[str]:
        number = self.count("num_hidden_layers", most=_MOST_LAYERS)
        kinds = self.get("layer_types")
        if kinds is not None and not (
            isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        ):
            raise ValueError(f"layer_types={shown(repr(kinds), 60)} must be a list of names.")
        if not self.family.listed_layers:
            kinds = [FULL if self._window() is None else WINDOW] * number
        elif kinds is None:
            kinds = self._default_layer_types(number)
        unknown = sorted(set(kinds) - set(self.family.layer_types))
        if unknown:
            raise ValueError(
                f"layer_types holds {shown(unknown[0], 60)!r}; a {self.model_type} has "
                f"{' and '.join(self.family.layer_types)}."
            )
        if len(kinds) != number:
            raise ValueError(
                f"layer_types names {len(kinds)} layers, num_hidden_layers={number}; the file "
                "contradicts itself."
            )
        return list(kinds)

    def _default_layer_types(self, number: int) -> list[str]:
        family = self.family
        if family.full_every is None:
            if self._window() is None:
                return [FULL] * number
            if family.skipped_positions:
                return [FULL if turns else WINDOW for turns in self._turning(number)]
            first = self.count("max_window_layers", least=0)
            return [WINDOW if i >= first else FULL for i in range(number)]
        every = family.full_every
        every = self.count(every) if isinstance(every, str) else every
        other = next(kind for kind in family.layer_types if kind != FULL)
        kinds = [FULL if (i + 1) % every == 0 else other for i in range(number)]
        if family.norms == "attention_outputs" and FULL not in kinds:
            kinds[-1] = FULL  # As OLMo-Hybrid's code does for few layers.
        return kinds

    def _window(self) -> int | None:
        """Tokens that a layer with a window sees; None: there is no window."""
        off = self.family.window == "switched" and not self.flag("use_sliding_window")
        if self.family.window == "none" or off:
            return None
        none = self.is_null("sliding_window") or self.get("sliding_window") is None
        return None if none else self.count("sliding_window")

    def _turning(self, number: int) -> list[bool]:
        """Of each layer, whether it turns queries and keys."""
        if not self.family.skipped_positions:
            return [True] * number
        listed, key = self.get("no_rope_layers"), "no_rope_layers"
        if listed is None:
            every = self.count("no_rope_layer_interval")
            return [(i + 1) % every != 0 for i in range(number)]
        if (
            not isinstance(listed, list)
            or len(listed) < number
            or any(x not in (0, 1) for x in listed)
        ):
            raise ValueError(
                f"{key}={shown(repr(listed), 60)} must be a list of 0 and 1, one for each of "
                f"{number} layers."
            )
        return [bool(x) for x in listed[:number]]

    def _mixers(
        self, kinds: list[str], window: int | None
    ) -> tuple[AttentionConfig, tuple[Mixer, ...]]:
        """Settings of the layers that go by a name, and each layer's name or settings."""
        turns = rotary(self, self.family, self.model_type)
        shared = self._attention()
        full = replace(shared, **turns.full)
        slides = replace(shared, **turns.window)
        mixers: list[Mixer] = []
        for kind, turning in zip(kinds, self._turning(len(kinds)), strict=True):
            if kind == DELTA:
                mixers.append("gdn")
            elif kind == FULL:
                mixers.append("attention" if turning else shared)
            elif turning and slides == full:
                mixers.append("swa")
            else:
                mixers.append(replace(slides if turning else shared, window=window))
        return full, tuple(mixers)

    def _attention(self) -> AttentionConfig:
        """Settings of attention without positions and window."""
        family, heads = self.family, self.count("num_attention_heads")
        head_dim = self.optional_count("head_dim") or self.count("hidden_size") // heads
        key_heads = self.optional_count("num_key_value_heads")
        if self.is_null("num_key_value_heads"):
            key_heads = None
        biases = {"asked": lambda: self.flag("attention_bias"), "inputs": lambda: True}
        score_dim = self.count("query_pre_attn_scalar") if family.score_dim else head_dim
        return AttentionConfig(
            num_heads=heads,
            num_kv_heads=key_heads or heads,
            head_dim=head_dim,
            gated=family.gated,
            qk_norm=family.qk_norm,
            norm_offset=family.norm_offset,
            bias=biases.get(family.biases, lambda: False)(),
            output_bias=False if family.biases == "inputs" else None,
            score_dim=None if score_dim == head_dim else score_dim,
            **NO_POSITIONS,
        )

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
        if self.family.experts == "all":
            return tuple(range(number))
        if self.family.experts == "none" or not self.optional_count("num_experts"):
            return ()
        dense, every = self.get("mlp_only_layers") or [], self.count("decoder_sparse_step")
        if not isinstance(dense, list) or len(dense) > _MOST_LAYERS:
            raise ValueError(f"mlp_only_layers={shown(repr(dense), 60)} must be a list of layers.")
        return tuple(i for i in range(number) if i not in dense and (i + 1) % every == 0)

    def _experts(self) -> ExpertsConfig:
        shared = "shared_expert_intermediate_size"
        return ExpertsConfig(
            num_experts=self.count("num_experts", most=_MOST_EXPERTS),
            top_k=self.count("num_experts_per_tok"),
            hidden_dim=self.count("moe_intermediate_size"),
            shared_dim=self.count(shared) if self.family.shared_expert else None,
            renormalize=self.family.experts == "all" or self.flag("norm_topk_prob"),
            balance_weight=self.real("router_aux_loss_coef"),
        )
