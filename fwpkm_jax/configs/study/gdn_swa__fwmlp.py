"""The study's backbone with the paper's dense fast-weight memory before its last layer."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import CHUNK_SIZE, variant
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.rules import FwMLP


def get_config() -> Experiment:
    return variant(
        "gdn_swa__fwmlp",
        memory_layers=(2,),
        fast_weight=FastWeightConfig(
            rule=FwMLP(key_dim=64, value_dim=64, hidden_dim=64),
            chunk_size=CHUNK_SIZE,
            weight_by_gate=False,
        ),
    )
