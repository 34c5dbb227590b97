"""The default without its fast-weight memory: what the attention window alone can recall.

python train.py configs/recall_without_memory.py && python eval.py runs/recall_without_memory
"""

import runpy
from dataclasses import replace
from pathlib import Path

from fwpkm_jax.config import Experiment


def get_config() -> Experiment:
    parent: Experiment = runpy.run_path(str(Path(__file__).with_name("recall.py")))["get_config"]()
    return replace(
        parent,
        model=replace(parent.model, memory_layers=()),
        run_dir="runs/recall_without_memory",
    )
