"""Maps each array of this package to a tensor of the authors' release and its layout there.

The names are those in published checkpoints. Fused projections group their values by head there;
the arrays of this package use the same grouping.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from fwpkm_jax.layers.mixers import AbstractMixerConfig, AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.outputs import layer_name
from fwpkm_jax.rules import FwMLP, FwPKM

Layout = Literal["same", "transposed", "rows", "convolution"]
"""How the release stores an array. transposed: a linear map as `[out, in]`. rows: all axes but the
last are flattened. convolution: `[channels, 1, width]`, which is `[width, channels]` here."""


class ReleaseTensor(NamedTuple):
    """A tensor of the release.

    Attributes:
      name: its name in the checkpoint.
      layout: how it differs from our array.
      optional: zeros replace it if it is absent.
    """

    name: str
    layout: Layout = "same"
    optional: bool = False


Names = dict[str, ReleaseTensor]
"""Tensors of the release by the paths of our arrays."""


def _linear(ours: str, theirs: str, *, bias: bool = False, optional: bool = False) -> Names:
    names = {f"{ours}/kernel": ReleaseTensor(f"{theirs}.weight", "transposed", optional)}
    if bias:
        names[f"{ours}/bias"] = ReleaseTensor(f"{theirs}.bias", optional=optional)
    return names


def _norm(ours: str, theirs: str, *, optional: bool = False) -> Names:
    return {f"{ours}/weight": ReleaseTensor(f"{theirs}.weight", optional=optional)}


def _below(ours: str, theirs: str, names: Names) -> Names:
    return {f"{ours}{k}": t._replace(name=f"{theirs}{t.name}") for k, t in names.items()}


GATED_DELTA_NET: Names = {
    **_linear("in_proj_qkvz", "in_proj_qkvz"),
    **_linear("in_proj_ba", "in_proj_ba"),
    "conv_weight": ReleaseTensor("conv1d.weight", "convolution"),
    "A_log": ReleaseTensor("A_log"),
    "dt_bias": ReleaseTensor("dt_bias"),
    **_norm("norm", "norm"),
    **_linear("out_proj", "out_proj"),
}
ATTENTION: Names = {
    **{k: t for name in "qkvo" for k, t in _linear(f"{name}_proj", f"{name}_proj").items()},
    **_norm("q_norm", "q_norm"),
    **_norm("k_norm", "k_norm"),
}
MIXERS: dict[type[AbstractMixerConfig], tuple[str, Names]] = {
    GatedDeltaNetConfig: ("linear_attn.", GATED_DELTA_NET),
    AttentionConfig: ("self_attn.", ATTENTION),
}
"""The release's prefix and names for a mixer, by the class of its configuration."""
MLP: Names = {
    k: t for name in ("gate_proj", "up_proj", "down_proj") for k, t in _linear(name, name).items()
}
PKM: Names = {
    "keys": ReleaseTensor("keys", "rows"),
    "values": ReleaseTensor("values.weight"),
    "query_scale": ReleaseTensor("query_proj.norm.weight"),
    **_linear("query_proj", "query_proj.query_mlps.0"),
    "query_proj/bias": ReleaseTensor("query_proj.query_mlps.0.bias", optional=True),
    **_linear("gate_proj", "swilu_projection", bias=True),
    **_linear("out_proj", "value_proj", bias=True),
}
FWPKM_MEMORY: Names = {"keys": ReleaseTensor("keys", "rows"), "values": ReleaseTensor("values")}
FWMLP_MEMORY: Names = {}
for _part in ("up", "gate", "down"):
    FWMLP_MEMORY[f"{_part}_kernel"] = ReleaseTensor(f"w_{_part}", "transposed")
    FWMLP_MEMORY[f"{_part}_bias"] = ReleaseTensor(f"b_{_part}")


def memory_block_names(*, gated: bool) -> Names:
    """Names of the projections around a fast-weight memory.

    Args:
      gated: whether the gate has any effect; if not, the release has no parameters for it.
    """
    gate = {
        **_norm("gate_norm", "fw_out_gate_norm", optional=not gated),
        **_linear("gate_proj", "fw_out_gate", bias=True, optional=not gated),
    }
    return {
        **_norm("query_norm", "fw_q_norm"),
        **_linear("query_proj", "fw_q_proj", bias=True),
        **_norm("value_norm", "fw_v_norm"),
        **_linear("value_proj", "fw_v_proj", bias=True),
        **(gate if gated else {}),
        **_norm("out_norm", "fw_out_norm"),
        **_linear("out_proj", "fw_out_proj", bias=True),
    }


def release_names(config: ModelConfig) -> Names:
    """The release's tensor for every array of a model, by the array's name in `Weights.named`.

    Raises:
      ValueError: the release has no such model.
    """
    if config.head_bias:
        raise ValueError("head_bias=True: the release's head has no bias.")
    if config.fast_weight_layer is not None:
        raise ValueError("fast_weight_layer: the release has no such layer; set it to None.")
    names: Names = {
        "params/embedding": ReleaseTensor("model.embed_tokens.weight"),
        **_norm("params/final_norm", "model.norm"),
    }
    if not config.tie_embeddings:
        names["params/head"] = ReleaseTensor("lm_head.weight", "transposed")
    for index in range(len(config.mixers)):
        theirs = f"model.layers.{index}."
        names |= _below(f"params/blocks/{index}/", theirs, _block_names(config, index))
        if index in config.memory_layers:
            rule = config.fast_weight.rule
            memories = {FwPKM: FWPKM_MEMORY, FwMLP: FWMLP_MEMORY}
            if type(rule) not in memories:
                raise ValueError(f"The release has no {type(rule).__name__} memory.")
            if isinstance(rule, FwPKM) and rule.retention is not None:
                raise ValueError(f"The release has no {rule.retention}; set it to None.")
            ours = f"memory/{layer_name(index)}/"
            names |= _below(ours, f"{theirs}fwpkm.", memories[type(rule)])
    return names


def _block_names(config: ModelConfig, index: int) -> Names:
    mixer = config.mixer_configs[index]
    if type(mixer) not in MIXERS:
        raise ValueError(
            f"mixers[{index}]={config.mixers[index]!r}: the release's names for such a layer are "
            "unknown; models with 'gdn', 'swa' and 'attention' can be imported."
        )
    is_pkm = index in config.pkm_layers
    names = {
        **_norm("mixer_norm", "input_layernorm"),
        **_norm("feed_forward_norm", "post_attention_layernorm"),
        **_below("mixer/", *MIXERS[type(mixer)]),
        **_below("feed_forward/", *(("pkm.", PKM) if is_pkm else ("mlp.", MLP))),
    }
    if is_pkm:
        pkm = config.pkm
        dropped = ["query_scale"] * (not pkm.query_norm)
        dropped += ["gate_proj/kernel", "gate_proj/bias"] * (not pkm.gated)
        for name in dropped:
            del names[f"feed_forward/{name}"]
    if index in config.memory_layers:
        fast = config.fast_weight
        gated = fast.gate_in_output or fast.weight_by_gate
        names |= _below("memory/", "", memory_block_names(gated=gated))
    return names


def shape_there(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape that one of our arrays has in the release."""
    if layout == "transposed":
        return shape[::-1]
    if layout == "rows":
        return (math.prod(shape[:-1]), shape[-1])
    return (shape[1], 1, shape[0]) if layout == "convolution" else shape


def to_ours(tensor, shape: tuple[int, ...], layout: Layout):
    """Converts a tensor of the release to our array of that shape; can be traced."""
    if layout == "transposed":
        return tensor.T
    return tensor[:, 0].T if layout == "convolution" else tensor.reshape(shape)


def to_theirs(array, layout: Layout):
    """Converts our array to the layout of the release; the inverse of `to_ours`."""
    if layout in ("transposed", "convolution"):
        return array.T if layout == "transposed" else array.T[:, None]
    return array.reshape(shape_there(tuple(np.shape(array)), layout))
