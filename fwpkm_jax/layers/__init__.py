"""Flax modules: memory layers, token mixers, and what both use.

A memory layer takes its memory as an argument and returns the new one; a token mixer keeps nothing
between sequences except in a cache. `fwpkm_jax.layers.mixers` holds every mixer.
"""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.layers.experts import Experts, ExpertsConfig
    from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightLayerConfig
    from fwpkm_jax.layers.lora import LoRAConfig
    from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig, FastWeightInfo
    from fwpkm_jax.layers.mixers import (
        AbstractMixer,
        AbstractMixerConfig,
        Attention,
        AttentionConfig,
        GatedDeltaNet,
        GatedDeltaNetConfig,
        LaCT,
        LaCTConfig,
        MatrixMemory,
        MatrixMemoryConfig,
        Titans,
        TitansConfig,
        register_mixer,
    )
    from fwpkm_jax.layers.mlp import SwiGLU
    from fwpkm_jax.layers.norms import GatedRMSNorm, RMSNorm
    from fwpkm_jax.layers.parameters import Declaration, declare, declare_linear, parameter
    from fwpkm_jax.layers.partition import MeshConfig, Partition
    from fwpkm_jax.layers.pkm import PKM, PKMConfig, PKMOutput
    from fwpkm_jax.layers.rotary import Llama3Scaling, YarnConfig

__all__ = [
    "PKM",
    "AbstractMixer",
    "AbstractMixerConfig",
    "Attention",
    "AttentionConfig",
    "Declaration",
    "Experts",
    "ExpertsConfig",
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
    "Llama3Scaling",
    "LoRAConfig",
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
    "declare",
    "declare_linear",
    "parameter",
    "register_mixer",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
