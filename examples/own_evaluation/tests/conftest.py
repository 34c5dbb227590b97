"""A run of a tiny model on a short text, with the weights as they were drawn."""

import json
import os

# These programs are small: compile quickly rather than well. Before JAX starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.state import MemoryConfig, init_state
from fwpkm_jax.training.training_config import TrainingConfig

TEXT = "The cat sat on the mat. " * 3


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The run's directory."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    paths = (str(folder / "text.txt"),)
    memory = MemoryConfig(groups=1, lifetime="carried")
    experiment = Experiment(
        model=ModelConfig(
            vocab_size=257,
            model_dim=16,
            mixers=("swa",),
            window=4,
            mlp_dim=16,
            memory_layers=(0,),
            fast_weight=FastWeightConfig(
                rule=FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2), chunk_size=8
            ),
            init_std=0.3,  # Large, so that writes show in the losses.
            activation_dtype="float32",
        ),
        data=TextData(train_paths=paths, valid_paths=paths, length=16),
        training=TrainingConfig(steps=1, batch_size=1, memory=memory),
        run_dir=str(folder),
    )
    config = experiment.to_json()
    (folder / "config.json").write_text(json.dumps(config))
    state = jax.jit(lambda: init_state(experiment.model, memory=memory, optimizer=None, seed=0))()
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(state, data_position=None, config=config)
    return folder
