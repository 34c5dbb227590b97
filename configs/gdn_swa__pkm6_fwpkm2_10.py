"""The paper's headline hybrid: GDN + sliding windows, PKM in layer 6, FwPKM in layers 2 and 10.

    python train.py configs/gdn_swa__pkm6_fwpkm2_10.py \
        --data.train_paths longcrawl64.bin fineweb_edu.bin --data.valid_paths valid.bin

516.31M parameters, fast weights included; 113.73M active per token (the slots one token reads: 128
of PKM, 8 of each FwPKM). 20,000 steps of 128 x 4,096 tokens. Layers are counted from 0. Adam's
betas and the clipping are not published; these are common values.

Needs accelerators: not trained here yet.
"""

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.training.config import TrainingConfig
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig


def get_config() -> Experiment:
    return Experiment(
        # Every width, head count and slot count of the paper is the default of its dataclass.
        model=ModelConfig(
            vocab_size=32_000,
            mixers=("gdn", "gdn", "gdn", "swa") * 3,
            memory_layers=(2, 10),
            pkm_layers=(6,),
        ),
        data=TextData(
            train_paths=("data/longcrawl64.train.bin", "data/fineweb_edu.train.bin"),
            train_weights=(0.5, 0.5),
            valid_paths=("data/fineweb_edu.valid.bin",),
            length=4096,
            tokenizer="mistral-v1",
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4,
            final_fraction=0.1,
            warmup_steps=100,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(
            steps=20_000,
            batch_size=128,
            micro_batches=16,
            memory=MemoryConfig(groups=1, lifetime="carried"),
        ),
        run_dir="runs/gdn_swa__pkm6_fwpkm2_10",
    )
