"""Flax modules: memory layers, token mixers, and what both use.

A memory layer takes its memory as an argument and returns the new one; a token mixer keeps nothing
between sequences except in a cache. `fwpkm_jax.layers.mixers` holds every mixer.
"""

from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig, FastWeightInfo
from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.lact import LaCT, LaCTConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemory, MatrixMemoryConfig
from fwpkm_jax.layers.mixers.titans import Titans
from fwpkm_jax.layers.mixers.titans_config import TitansConfig
from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm
from fwpkm_jax.layers.partition import MeshConfig, Partition
from fwpkm_jax.layers.pkm import PKM, PKMConfig, PKMOutput
from fwpkm_jax.layers.rotary import YarnConfig

__all__ = [
    "PKM",
    "Attention",
    "AttentionConfig",
    "FastWeight",
    "FastWeightConfig",
    "FastWeightInfo",
    "FastWeightLayer",
    "FastWeightLayerConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedRMSNorm",
    "LaCT",
    "LaCTConfig",
    "MatrixMemory",
    "MatrixMemoryConfig",
    "MeshConfig",
    "PKMConfig",
    "PKMOutput",
    "Partition",
    "RMSNorm",
    "SwiGLU",
    "Titans",
    "TitansConfig",
    "YarnConfig",
]
