"""The default with Titans in place of FwPKM; the command line chooses the wiring.

    python train.py configs/titans.py --model.mixers swa titans_mag --run_dir runs/titans_mag

`titans` is the memory alone; docs/explanation/family.md has the others.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from fwpkm_jax.config import Experiment
from fwpkm_jax.layers.mixers.titans_config import TitansConfig


def get_config() -> Experiment:
    parent: Experiment = runpy.run_path(str(Path(__file__).with_name("recall.py")))["get_config"]()
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
