"""Public-domain books, byte by byte, with a Fast Weight Layer before the head, on a CPU.

    fwpkm train fast_weight_layer && fwpkm eval runs/fast_weight_layer

`--model.fast_weight_layer.segment_length 256` lets steps fade. Its text is that of `books_tiny.py`.
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import books_tiny
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig


def get_config() -> Experiment:
    parent = books_tiny.get_config()
    return replace(
        parent,
        model=replace(
            parent.model,
            model_dim=64,
            mixers=("swa", "swa"),
            window=64,
            mlp_dim=128,
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=16, rotary_fraction=0.5
            ),
            memory_layers=(),
            fast_weight_layer=FastWeightLayerConfig(hidden_dim=128),
        ),
        data=replace(parent.data, length=1024),
        training=replace(parent.training, batch_size=2),
        run_dir="runs/fast_weight_layer",
    )
