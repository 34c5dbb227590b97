"""The memory for SmolLM2 that comes with the package fits the model that it is put into."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from fwpkm_jax.interchange import smollm2
from fwpkm_jax.interchange.weights import abstract_weights
from fwpkm_jax.models.config import ModelConfig


@pytest.mark.slow
def test_the_shipped_weights_are_those_of_the_memory_and_of_its_keys():
    model = ModelConfig(vocab_size=64, model_dim=576, mlp_dim=8, mixers=("attention",) * 30)
    like = abstract_weights(smollm2.model_with_memory(model)).named()
    path = smollm2.FOLDER / "memory.safetensors"
    arrays = load_file(path)
    assert path.stat().st_size < 8e6
    assert (smollm2.FOLDER / "README.md").is_file()
    memory = f"params/blocks/{smollm2.LAYER}/memory"
    own = {name for name in like if name.startswith(memory)}
    assert any("memory_mixer/" in name for name in own)
    assert {*arrays} == own | {f"memory/layer_{smollm2.LAYER}/keys"}
    for name, array in arrays.items():
        assert array.shape == like[name].shape, name
        assert np.isfinite(array).all()
    assert sum(arrays[name].size for name in own) <= 3_000_000
