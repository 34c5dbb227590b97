"""Token mixers; `base` is their contract, `register_mixer` gives one a name."""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.layers.mixers.attention import Attention, AttentionConfig
    from fwpkm_jax.layers.mixers.base import AbstractMixer, AbstractMixerConfig, Mask, MixerMemory
    from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
    from fwpkm_jax.layers.mixers.in_place import InPlaceConfig, InPlaceMLP
    from fwpkm_jax.layers.mixers.lact import LaCT, LaCTConfig
    from fwpkm_jax.layers.mixers.matrix_memory import (
        MatrixMemory,
        MatrixMemoryConfig,
        MatrixMixerConfig,
    )
    from fwpkm_jax.layers.mixers.persistent import PersistentTokens
    from fwpkm_jax.layers.mixers.registry import (
        mixer_config,
        mixer_module,
        mixer_names,
        register_mixer,
    )
    from fwpkm_jax.layers.mixers.titans import Titans
    from fwpkm_jax.layers.mixers.titans_config import TitansConfig
    from fwpkm_jax.layers.mixers.titans_variants import (
        TitansMAC,
        TitansMAG,
        TitansMAL,
        TitansMixerConfig,
    )

__all__ = [
    "AbstractMixer",
    "AbstractMixerConfig",
    "Attention",
    "AttentionConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "InPlaceConfig",
    "InPlaceMLP",
    "LaCT",
    "LaCTConfig",
    "Mask",
    "MatrixMemory",
    "MatrixMemoryConfig",
    "MatrixMixerConfig",
    "MixerMemory",
    "PersistentTokens",
    "Titans",
    "TitansConfig",
    "TitansMAC",
    "TitansMAG",
    "TitansMAL",
    "TitansMixerConfig",
    "mixer_config",
    "mixer_module",
    "mixer_names",
    "register_mixer",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
