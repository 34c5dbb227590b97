"""The paper's regime on the recall task: one memory for the whole batch, carried from step to step.

fwpkm train recall_carried && fwpkm eval runs/recall_carried
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import recall
from fwpkm_jax.data import RecallData
from fwpkm_jax.training.state import MemoryConfig

# Many possible keys, so that facts of different sequences and steps rarely meet in the one memory.
NUM_KEYS = 4096


def get_config() -> Experiment:
    parent = recall.get_config()
    assert isinstance(parent.data, RecallData)
    data = replace(parent.data, num_keys=NUM_KEYS)
    rule = replace(parent.model.fast_weight.rule, num_subkeys=128)
    return replace(
        parent,
        data=data,
        model=replace(
            parent.model,
            vocab_size=data.vocab_size,
            # From a gate of a half, learning depends on chance.
            fast_weight=replace(parent.model.fast_weight, rule=rule, gate_bias=2.0),
        ),
        training=replace(
            parent.training,
            steps=1000,
            batch_size=8,
            memory=MemoryConfig(groups=1, lifetime="carried"),
        ),
        run_dir="runs/recall_carried",
    )
