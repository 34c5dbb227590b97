"""The default with a matrix memory in place of FwPKM; the command line chooses which.

    fwpkm train matrix_memory --model.mixers gla swa --run_dir runs/gla

`fwpkm_jax.rules.MATRIX_RULES` has the names. A rule's own settings are fields of an instance in
`matrix.rules`.
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import recall
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig


def get_config() -> Experiment:
    parent = recall.get_config()
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
