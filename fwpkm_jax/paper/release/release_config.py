"""The configuration of a model of the authors' release from its `config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fwpkm_jax.interchange.hf.families import FAMILIES, Family
from fwpkm_jax.interchange.hf.rope import DELTA, FULL, WINDOW
from fwpkm_jax.interchange.hf.settings import family_config
from fwpkm_jax.interchange.values import Values
from fwpkm_jax.io.untrusted import shown
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import AbstractChunkRule, FwMLP, FwPKM

MODEL_TYPE = "qwen3_next_mem"
"""What the authors' code calls its models with memories."""
_NEXT = FAMILIES["qwen3_next"]
_FAMILY: Family = replace(
    _NEXT,
    layer_types=(DELTA, WINDOW, FULL),
    window="given",
    experts="none",
    defaults={
        **_NEXT.defaults, "sliding_window": None,
        "pkm_layers": [], "pkm_k_dim": 512, "pkm_v_dim": 512, "pkm_heads": 4, "pkm_topk": 32,
        "pkm_n_subkeys": 512, "pkm_query_rmsnorm": True, "fwpkm_layers": [], "fwpkm_k_dim": 512,
        "fwpkm_v_dim": 512, "fwpkm_heads": 1, "fwpkm_topk": 8, "fwpkm_n_subkeys": 512,
        "fwpkm_variant": "pkm", "fwpkm_fp32_fw": True, "fwpkm_before_attn": True,
        "fwpkm_update_chunk_size": 512, "fwpkm_loss_type": "mse", "fwpkm_optimizer_type": "sgd",
        "fwpkm_optimizer_lr": 1.0, "fwpkm_optimizer_weight_decay": 0.0, "fwpkm_grad_clip": False,
        "fwpkm_addr_loss_weight": 1.0, "fwpkm_weight_loss_with_gates": True,
        "fwpkm_mem_grad_to_values_only": True, "fwpkm_query_src": "hidden",
        "fwpkm_value_src": "hidden", "fwpkm_target_value_lookahead": 1,
        "fwpkm_score_nonlinear": "softmax", "fwpkm_qk_score_type": "idw",
        "fwpkm_score_temperature": 1.0, "fwpkm_out_fuse_gate": True,
    },
)  # fmt: skip
"""The backbone is Qwen3-Next's without experts. Defaults are those of the authors' class."""
_NORMS: Mapping[str | None, Any] = {None: "none", "zero_mean": "standardize", "l2norm": "l2"}
_SCORES: Mapping[str, Any] = {"idw": "idw", "dot_product": "dot"}
_NONLINEAR: Mapping[str, Any] = {name: name for name in ("softmax", "silu", "relu")}
_MLP_LOSSES: Mapping[str, Any] = {"mse": "squared", "mae": "absolute", "l1": "absolute"}
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "fwpkm_fp32_fw": True,
    "fwpkm_before_attn": True,
    "fwpkm_query_src": "hidden",
    "fwpkm_value_src": "hidden",
    "fwpkm_optimizer_type": "sgd",
}
"""Keys for which this package has one value of the release's alone."""


def release_config(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` of the authors' release describes.

    A key `fwpkm_target_lookahead`, as their published files have it, is not read: their code does
    not read it either, and takes `fwpkm_target_value_lookahead`, by default 1.

    Raises:
      ValueError: it is no file of theirs, or asks for something that this package has not, named
        with its key.
    """
    if values.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"model_type={shown(repr(values.get('model_type')), 60)} is not {MODEL_TYPE!r}; for "
            "another model of theirs give the config that was trained by --config."
        )
    read = Values(values, _FAMILY.defaults)
    for key, only in _FIXED.items():
        if read.get(key) != only:
            raise ValueError(f"{key}={shown(repr(read.get(key)), 60)}: only {only!r} is known.")
    if values.get("layer_types") is None:
        values = {**values, "layer_types": _layer_types(read)}
    model = family_config(values, _FAMILY)
    hidden, width = model.model_dim, read.get("pkm_v_dim")
    return replace(
        model,
        memory_layers=_layers(read, "fwpkm_layers"),
        fast_weight=FastWeightConfig(
            rule=_rule(read),
            chunk_size=read.count("fwpkm_update_chunk_size"),
            query_norm=_choice(read, "fwpkm_compress_query", _NORMS),
            # Their class has this default, of which null is no sign.
            value_norm=_choice(read, "fwpkm_compress_value", _NORMS, missing="zero_mean"),
            # Their fast MLP takes no weights of the loss, whatever this key says.
            weight_by_gate=_is_pkm(read) and read.flag("fwpkm_weight_loss_with_gates"),
            gate_output=read.flag("fwpkm_out_fuse_gate"),
        ),
        pkm_layers=_layers(read, "pkm_layers"),
        pkm=PKMConfig(
            num_subkeys=read.count("pkm_n_subkeys"),
            key_dim=read.count("pkm_k_dim"),
            value_dim=hidden if width == -1 else read.count("pkm_v_dim"),
            num_heads=read.count("pkm_heads"),
            top_k=read.count("pkm_topk"),
            query_norm=read.flag("pkm_query_rmsnorm"),
        ),
    )


def _layer_types(read: Values) -> list[str]:
    """Three layers of Gated DeltaNet, then one of attention, with a window where there is one."""
    every = read.count("full_attention_interval")
    attention = FULL if read.get("sliding_window") is None else WINDOW
    number = read.count("num_hidden_layers", most=10_000)
    return [DELTA if (i + 1) % every else attention for i in range(number)]


def _layers(read: Values, key: str) -> tuple[int, ...]:
    layers = read.get(key)
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{key}={shown(repr(layers), 60)} must be a list of layers.")
    return tuple(layers)


def _is_pkm(read: Values) -> bool:
    kinds = {"pkm": True, "mlp": False}
    return _choice(read, "fwpkm_variant", kinds)


def _rule(read: Values) -> AbstractChunkRule:
    """How their memory is written."""
    clip = 1.0 if read.flag("fwpkm_grad_clip") else None
    shared: dict[str, Any] = {
        "key_dim": read.count("fwpkm_k_dim"),
        "value_dim": read.count("fwpkm_v_dim"),
        "lookahead": read.count("fwpkm_target_value_lookahead", least=0),
        "learning_rate": read.real("fwpkm_optimizer_lr"),
        "weight_decay": read.real("fwpkm_optimizer_weight_decay"),
        "write_clip": clip,
    }
    if not _is_pkm(read):
        return FwMLP(
            hidden_dim=read.count("fwpkm_n_subkeys"),
            target="mean",
            loss=_choice(read, "fwpkm_loss_type", _MLP_LOSSES),
            **shared,
        )
    _choice(read, "fwpkm_loss_type", {"mse": None})
    values_only = read.flag("fwpkm_mem_grad_to_values_only")
    if _choice(read, "fwpkm_addr_loss", {"me": True, None: False}, missing="me"):
        key_loss = "addressing" if values_only else "both"
    elif values_only:
        raise ValueError(
            "fwpkm_addr_loss=None and fwpkm_mem_grad_to_values_only=True: nothing moves the keys."
        )
    else:
        key_loss = "reconstruction"
    return FwPKM(
        num_subkeys=read.count("fwpkm_n_subkeys"),
        num_heads=read.count("fwpkm_heads"),
        top_k=read.count("fwpkm_topk"),
        score=_choice(read, "fwpkm_qk_score_type", _SCORES),
        nonlinearity=_choice(read, "fwpkm_score_nonlinear", _NONLINEAR),
        temperature=read.real("fwpkm_score_temperature"),
        key_loss=key_loss,
        addressing_weight=read.real("fwpkm_addr_loss_weight"),
        **shared,
    )


def _choice(read: Values, key: str, known: Mapping[Any, Any], *, missing: str | None = None) -> Any:
    """What a file's word means; `missing` stands for a key that is not there."""
    word = read.get(key) if read.given(key) or missing is None else missing
    if not isinstance(word, str | None) or word not in known:
        names = ", ".join("null" if name is None else name for name in known)
        raise ValueError(f"{key}={shown(repr(word), 60)} is none of {names}.")
    return known[word]
