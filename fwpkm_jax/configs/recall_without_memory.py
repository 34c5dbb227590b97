"""The default without its fast-weight memory: what the attention window alone can recall.

fwpkm train recall_without_memory && fwpkm eval runs/recall_without_memory
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import recall


def get_config() -> Experiment:
    parent = recall.get_config()
    return replace(
        parent,
        model=replace(parent.model, memory_layers=()),
        run_dir="runs/recall_without_memory",
    )
