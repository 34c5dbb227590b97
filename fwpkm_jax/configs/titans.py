"""The default with Titans in place of FwPKM; the command line chooses the variant.

    fwpkm train titans --model.mixers swa titans_mag --run_dir runs/titans_mag

`titans` is the memory alone, `titans_mac` and `titans_mal` the two other variants.
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import recall
from fwpkm_jax.layers.mixers.titans_config import TitansConfig


def get_config() -> Experiment:
    parent = recall.get_config()
    return replace(
        parent,
        model=replace(
            parent.model,
            mixers=("swa", "titans_mac"),
            titans=TitansConfig(num_heads=2, head_dim=32, chunk_size=32, num_persistent=4),
            memory_layers=(),
        ),
        run_dir="runs/titans",
    )
