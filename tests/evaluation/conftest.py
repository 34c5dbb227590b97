"""A tiny model and its memory, shared by the tests of evaluations."""

import jax
import pytest
from flax import nnx

from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.rules import FwPKM


def tiny_model_config(**changes) -> ModelConfig:
    """Window attention, a memory, GDN; chunks of 8, bytes as tokens."""
    return ModelConfig(
        **{
            "vocab_size": 257,
            "model_dim": 16,
            "mixers": ("swa", "gdn"),
            "window": 4,
            "mlp_dim": 16,
            "attention": AttentionConfig(
                num_heads=2, num_kv_heads=1, head_dim=8, rotary_fraction=0.5
            ),
            "gdn": GatedDeltaNetConfig(
                num_key_heads=1, num_value_heads=2, key_head_dim=4, value_head_dim=4
            ),
            "memory_layers": (1,),
            "fast_weight": FastWeightConfig(
                rule=FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2), chunk_size=8
            ),
            "init_std": 0.3,  # Large, so that writes show in the losses.
            "activation_dtype": "float32",
            **changes,
        }
    )


@pytest.fixture(scope="session")
def model() -> LanguageModel:
    return LanguageModel(tiny_model_config(), rngs=nnx.Rngs(0))


@pytest.fixture(scope="session")
def memory(model: LanguageModel):
    return model.init_memory(jax.random.key(1), groups=1)
