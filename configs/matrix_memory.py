"""The default with a matrix memory in place of FwPKM; the command line chooses which.

    python train.py configs/matrix_memory.py --model.mixers gla swa --run_dir runs/gla

docs/explanation/family.md lists the names. A rule's own settings are fields of an instance in
`matrix.rules`.
"""

import runpy
from dataclasses import replace
from pathlib import Path

from fwpkm_jax.config import Experiment
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig


def get_config() -> Experiment:
    parent: Experiment = runpy.run_path(str(Path(__file__).with_name("recall.py")))["get_config"]()
    return replace(
        parent,
        model=replace(
            parent.model,
            mixers=("deltanet", "swa"),
            matrix=MatrixMemoryConfig(
                num_key_heads=2, num_value_heads=2, key_head_dim=32, value_head_dim=32
            ),
            memory_layers=(),
        ),
        run_dir="runs/matrix_memory",
    )
