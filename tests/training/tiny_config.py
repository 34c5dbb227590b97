"""The smallest run that exercises every part of training; a config file like those in configs/."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import RecallData
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig


def get_config() -> Experiment:
    """Two layers of width 16, a memory at layer 1 carried from step to step, rows of 16 tokens."""
    data = RecallData(
        length=16, num_facts=2, num_keys=4, num_values=4, num_filler=4, min_distance=4, num_valid=8
    )
    return Experiment(
        model=ModelConfig(
            vocab_size=data.vocab_size,
            model_dim=16,
            mixers=("swa", "swa"),
            window=8,
            mlp_dim=16,
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, rotary_fraction=0.5),
            memory_layers=(1,),
            fast_weight=FastWeightConfig(
                rule=FwPKM(num_subkeys=4, key_dim=8, value_dim=8, top_k=2), chunk_size=8
            ),
            tie_embeddings=False,
            activation_dtype="float32",
        ),
        data=data,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=4),
        training=TrainingConfig(
            steps=20,
            batch_size=4,
            memory=MemoryConfig(groups=2, lifetime="carried"),
            validation_batches=1,
        ),
        checkpoint=CheckpointConfig(every=5),
        run_dir="runs/tiny",
    )
