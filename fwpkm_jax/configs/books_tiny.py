"""Public-domain books, byte by byte: a small GDN + sliding-window model with FwPKM, on a CPU.

    fwpkm train books_tiny && fwpkm eval runs/books_tiny

Reads the package's own sample of 197 kB; for more text, add
`--data.train_paths PATH --data.valid_paths PATH`.
"""

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData, sample, vocab_size
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig


def get_config() -> Experiment:
    data = TextData(
        train_paths=(sample.TRAIN,),
        valid_paths=(sample.VALID,),
        length=512,
    )
    return Experiment(
        model=ModelConfig(
            vocab_size=vocab_size(data),
            model_dim=128,
            mixers=("gdn", "swa", "swa"),
            window=32,
            mlp_dim=256,
            attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=32),
            gdn=GatedDeltaNetConfig(
                num_key_heads=2,
                num_value_heads=2,
                key_head_dim=16,
                value_head_dim=16,
                decay_start="constant",
            ),
            memory_layers=(2,),
            fast_weight=FastWeightConfig(
                rule=FwPKM(num_subkeys=128, key_dim=128, value_dim=128),
                chunk_size=64,
            ),
            # From smaller weights, a tied head and branches at full size the gate falls to 0.09
            # within a hundred steps.
            tie_embeddings=False,
            init_std=0.05,
            branch_init_scale=0.1,
            activation_dtype="float32",
        ),
        data=data,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.01),
        training=TrainingConfig(
            steps=800,
            batch_size=8,
            memory=MemoryConfig(groups=1, lifetime="carried"),
            log_every=20,
        ),
        run_dir="runs/books_tiny",
    )
