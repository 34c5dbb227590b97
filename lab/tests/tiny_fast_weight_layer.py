"""A config like `fast_weight_layer`, as small as its benchmark takes."""

from dataclasses import replace

from fwpkm_jax.config import Experiment, load_config
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig


def get_config() -> Experiment:
    """One layer of width 16, rows of 32 bytes."""
    parent = load_config("fast_weight_layer")
    model = replace(
        parent.model,
        model_dim=16,
        mixers=("swa",),
        window=8,
        mlp_dim=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_fraction=0.5),
        fast_weight_layer=FastWeightLayerConfig(hidden_dim=16),
    )
    return replace(
        parent,
        model=model,
        data=replace(parent.data, length=32),
        training=replace(parent.training, batch_size=2),
    )
