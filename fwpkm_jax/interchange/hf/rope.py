"""Rotary settings of a `config.json`, of layers with full attention and of those with a window."""

import math
from typing import Any, NamedTuple

from fwpkm_jax.interchange.hf.families import Family
from fwpkm_jax.interchange.values import Values, count, real
from fwpkm_jax.io.untrusted import shown
from fwpkm_jax.layers.rotary import Llama3Scaling, YarnConfig

FULL, WINDOW, DELTA = "full_attention", "sliding_attention", "linear_attention"
"""The library's names of kinds of layers."""
NO_POSITIONS: dict[str, Any] = {"rotary_fraction": 0.0}
"""Settings of `AttentionConfig` for a layer that does not turn queries and keys."""
_KINDS = ("default", "mrope", "linear", "llama3", "yarn")


class Rotary(NamedTuple):
    """Settings of `AttentionConfig` by kind of layer."""

    full: dict[str, Any]
    window: dict[str, Any]


def rotary(values: Values, family: Family, model_type: str) -> Rotary:
    """What turns queries and keys.

    Raises:
      ValueError: positions are stretched in a way that this package has not, or a value is wrong.
    """
    reader = _Rope(values, family, model_type)
    if family.window_theta is not None:
        return reader.by_layer(*family.window_theta)
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.object(key)
    nested = sorted({FULL, WINDOW, DELTA} & rope.keys())
    if nested:
        raise ValueError(
            f"{key} has an entry for {nested[0]}; positions that differ by layer are not known in "
            f"a {model_type}."
        )
    settings = reader.settings(rope, key)
    return Rotary(settings, settings)


class _Rope:
    def __init__(self, values: Values, family: Family, model_type: str):
        self.values, self.family, self.model_type = values, family, model_type

    def by_layer(self, window_key: str, window_theta: float) -> Rotary:
        """Of a family whose layers with a window have a base of their own and are not stretched by
        `rope_scaling`."""
        given, key = self.values.object("rope_parameters"), "rope_parameters"
        if given and not {FULL, WINDOW} & given.keys():
            raise ValueError(
                f"{key} of a {self.model_type} needs entries for {FULL} and {WINDOW}; it has "
                f"{', '.join(shown(name, 30) for name in sorted(given)[:3])}."
            )
        nested = Values(given, {})
        full = {**nested.object(FULL), **self.values.object("rope_scaling")}
        window = nested.object(WINDOW)
        if self.values.given(window_key):
            window_theta = self.values.get(window_key)
        window.setdefault("rope_theta", window_theta)
        return Rotary(
            self.settings(full, f"{key}.{FULL}"), self.settings(window, f"{key}.{WINDOW}")
        )

    def settings(self, rope: dict[str, Any], key: str) -> dict[str, Any]:
        """The settings of `AttentionConfig` for one object of the file."""
        family, rope = self.family, dict(rope)
        if "rope_theta" not in rope:
            given = self.values.given("rope_theta")
            rope["rope_theta"] = self.values.get("rope_theta") if given else family.rope_theta
        rope.setdefault("partial_rotary_factor", self.values.get("partial_rotary_factor"))
        share = rope["partial_rotary_factor"]
        share = 1.0 if share is None else share
        if rope["rope_theta"] is None and family.optional_positions:
            return NO_POSITIONS
        if share != 1 and not family.partial_rotary:
            raise ValueError(
                f"partial_rotary_factor={shown(repr(share), 60)} has no meaning in a "
                f"{self.model_type}."
            )
        settings = {
            "rotary_fraction": real(share, f"{key}.partial_rotary_factor"),
            "rope_theta": real(rope["rope_theta"], f"{key}.rope_theta"),
        }
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(
                f"{key}: rope_type={shown(repr(kind), 60)} is none of default, linear, llama3 and "
                "yarn."
            )
        if kind in ("default", "mrope"):  # Three equal positions turn like one.
            return settings
        if kind == "linear":
            return {**settings, "linear_scaling": _value(rope, key, "factor")}
        original = self.values.get("original_max_position_embeddings")
        original = original or rope.get("original_max_position_embeddings")
        original = original or self.values.get("max_position_embeddings")
        original = count(original, "max_position_embeddings")
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor")
            numbers = {name: _value(rope, key, name) for name in names}
            return {**settings, "llama3": Llama3Scaling(original_length=original, **numbers)}
        return {**settings, "yarn": self._yarn(rope, original)}

    def _yarn(self, rope: dict[str, Any], original: int) -> YarnConfig:
        def optional(name: str) -> float | None:
            value = rope.get(name)
            return None if value is None else real(value, name)

        factor = optional("factor")
        longest = self.values.count("max_position_embeddings")
        factor = longest / original if factor is None else factor
        attention_factor = optional("attention_factor")
        mscale, mscale_all = optional("mscale"), optional("mscale_all_dim")
        if attention_factor is None and mscale and mscale_all:
            attention_factor = 1.0
            if factor > 1:
                log = 0.1 * math.log(factor)
                attention_factor = (mscale * log + 1) / (mscale_all * log + 1)
        truncate = rope.get("truncate")
        return YarnConfig(
            factor=factor,
            original_length=original,
            beta_fast=optional("beta_fast") or 32.0,
            beta_slow=optional("beta_slow") or 1.0,
            attention_factor=attention_factor,
            truncate=True if truncate is None else bool(truncate),
        )


def _value(rope: dict[str, Any], key: str, name: str) -> float:
    if rope.get(name) is None:
        raise ValueError(f"{key} has no {name}, which rope_type={rope.get('rope_type')} needs.")
    return real(rope[name], f"{key}.{name}")
