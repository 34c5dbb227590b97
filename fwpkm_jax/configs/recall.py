"""The default: recall of facts beyond the attention window, one fast-weight memory per sequence."""

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
    data = RecallData(length=256, num_facts=16, num_keys=64, num_values=64, min_distance=96)
    batch_size = 32
    return Experiment(
        model=ModelConfig(
            vocab_size=data.vocab_size,
            model_dim=64,
            mixers=("swa", "swa"),
            window=32,
            mlp_dim=128,
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=16, rotary_fraction=0.5
            ),
            memory_layers=(1,),
            fast_weight=FastWeightConfig(
                rule=FwPKM(num_subkeys=32, key_dim=64, value_dim=64, top_k=8), chunk_size=64
            ),
            tie_embeddings=False,
            head_bias=True,
            head_init_std=0.0,
            branch_init_scale=0.1,
            activation_dtype="float32",
        ),
        data=data,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=50, weight_decay=0.01),
        training=TrainingConfig(
            steps=600,
            batch_size=batch_size,
            memory=MemoryConfig(groups=batch_size, lifetime="batch"),
            log_every=50,
        ),
        checkpoint=CheckpointConfig(),
        run_dir="runs/recall",
    )
