"""The model of `fwpkm demo`: it is told phone numbers in text and asked for them later.

    fwpkm train demo

Books byte by byte, with sentences that state a number under a name. In most rows these are made of
words of the row itself, so that none comes twice; in others they are `Call NAME at DIGITS.` Names
and numbers are drawn anew for every row, so the slow weights learn how to look a number up in any
sentence, not the number.
`fwpkm_jax/demo/README.md` is the card of the weights that the package ships.
"""

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import NeedleMix, TextData, sample, vocab_size
from fwpkm_jax.layers.memories.fast_weight import FastWeightConfig
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.models.language_model import ModelConfig
from fwpkm_jax.rules import FwPKM
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig
from fwpkm_jax.training.training_config import TrainingConfig

SENTENCE = "Call {key} at {value}."
BATCH_SIZE = 8


def get_config() -> Experiment:
    data = TextData(
        train_paths=(sample.TRAIN,),
        valid_paths=(sample.VALID,),
        length=768,
        needles=NeedleMix(
            sentence=SENTENCE,
            drawn_share=0.8,
            keys="names",
            key_characters=6,
            value_digits=4,
            num_needles=6,
            min_distance=128,
            answer_weight=16.0,
        ),
    )
    return Experiment(
        model=ModelConfig(
            vocab_size=vocab_size(data),
            model_dim=128,
            mixers=("gdn", "swa", "swa"),
            window=16,
            mlp_dim=256,
            attention=AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=32, rotary_fraction=0.5
            ),
            gdn=GatedDeltaNetConfig(
                num_key_heads=4,
                num_value_heads=4,
                key_head_dim=16,
                value_head_dim=16,
                conv_width=16,
            ),
            memory_layers=(2,),
            # The gate starts open, and queries are narrow: the model learns the lookup sooner.
            fast_weight=FastWeightConfig(
                rule=FwPKM(num_subkeys=64, key_dim=16, value_dim=64), chunk_size=64, gate_bias=2.0
            ),
            tie_embeddings=False,
            init_std=0.05,
            branch_init_scale=0.1,
            activation_dtype="float32",
        ),
        data=data,
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.01),
        training=TrainingConfig(
            steps=800,
            batch_size=BATCH_SIZE,
            # One memory for each place in the batch, carried from step to step.
            memory=MemoryConfig(groups=BATCH_SIZE, lifetime="carried", address_loss=0.3),
            log_every=20,
        ),
        run_dir="runs/demo",
    )
