"""A decoder of two layers with both: `fwpkm train examples/own_memory/tiny.py`."""

from own_memory import Hebbian

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import RecallData
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig


def get_config() -> Experiment:
    data = RecallData(
        length=32, num_facts=2, num_keys=8, num_values=8, num_filler=4, min_distance=8, num_valid=8
    )
    return Experiment(
        plugins=("own_memory",),
        model=ModelConfig(
            vocab_size=data.vocab_size,
            model_dim=16,
            mixers=("moving_average", "moving_average"),
            mlp_dim=16,
            memory_layers=(1,),
            fast_weight=FastWeightConfig(rule=Hebbian(key_dim=8, value_dim=8), chunk_size=8),
            tie_embeddings=False,
            activation_dtype="float32",
        ),
        data=data,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        training=TrainingConfig(
            steps=6,
            batch_size=8,
            memory=MemoryConfig(groups=8, lifetime="carried"),
            validation_batches=1,
            log_every=1,
        ),
        checkpoint=CheckpointConfig(every=3),
        run_dir="runs/own_memory",
    )
