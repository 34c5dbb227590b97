"""A decoder of the size of Sparse Delta Memory's paper: 3 window layers to each layer with memory.

    fwpkm train sdm_heads --data.train_paths text.bin --data.valid_paths valid.bin

24 layers of width 2,048; 6 of them have two heads with a table of 65,536 slots each, of which a
token writes and reads 128 (arXiv:2607.07386). The width of a slot, the MLP's, the vocabulary and
the text are not those of its authors, and tables start from zeros where theirs are learned: with
`SDMHeads(first_table="learned")` in `matrix.rules`, 0.2 billion weights more. A row of 4,096 tokens
has 0.8 GB of tables. Needs accelerators: not trained here.
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.layers.mixers.attention import AttentionConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.paper.configs import paper_experiment
from fwpkm_jax.training.optimizer import OptimizerConfig


def get_config() -> Experiment:
    parent = paper_experiment("gdn_swa")
    return replace(
        parent,
        model=ModelConfig(
            model_dim=2048,
            mlp_dim=5632,
            mixers=("swa", "swa", "swa", "sdm_heads") * 6,
            window=1024,
            attention=AttentionConfig(num_heads=16, num_kv_heads=16, head_dim=128),
            matrix=MatrixMemoryConfig(
                num_key_heads=2, num_value_heads=2, key_head_dim=512, value_head_dim=256
            ),
        ),
        optimizer=OptimizerConfig(
            learning_rate=1.2e-3,
            final_fraction=0.01,
            warmup_steps=252,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=replace(parent.training, steps=40_000),
        run_dir="runs/sdm_heads",
    )
