"""The models of docs/measurements/real_size.md by name: 24 million slow weights on bytes."""

from __future__ import annotations

from typing import Any

from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers import GatedDeltaNetConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM

MEMORIES: dict[str, dict[str, Any]] = {
    "gdn": {},
    "gdn__fwpkm2_4": {"memory_layers": (2, 4)},
    "gdn__pkm2_4": {"pkm_layers": (2, 4)},
    "gdn__pkm3_fwpkm2_4": {"pkm_layers": (3,), "memory_layers": (2, 4)},
}
"""Memories of the backbone by the model's name. Layers are counted from 0."""


def real_size_model(name: str) -> ModelConfig:
    """Six layers of Gated DeltaNet, 512 wide, with the memories that `name` states.

    Each memory has 256 x 256 slots of 512 numbers: fast weights in FwPKM, slow ones in PKM.

    Raises:
      ValueError: `name` is none of `MEMORIES`.
    """
    if name not in MEMORIES:
        raise ValueError(f"{name!r} is none of the models {', '.join(MEMORIES)}.")
    return ModelConfig(
        vocab_size=384,  # 256 bytes, the end of a document, and up to a multiple of 128: a tile.
        model_dim=512,
        mixers=("gdn",) * 6,
        mlp_dim=1792,
        gdn=GatedDeltaNetConfig(
            num_key_heads=4, num_value_heads=4, key_head_dim=128, value_head_dim=128
        ),
        # Open gates: with gates that start at a half some seeds of smaller models never learned
        # to look needles up (docs/measurements/recall.md).
        fast_weight=FastWeightConfig(rule=FwPKM(num_subkeys=256), chunk_size=512, gate_bias=2.0),
        pkm=PKMConfig(num_subkeys=256),
        tie_embeddings=False,
        **MEMORIES[name],
    )
