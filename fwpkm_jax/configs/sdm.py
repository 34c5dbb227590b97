"""The default with Sparse Delta Memory in place of FwPKM: as many slots, as many of them read."""

from dataclasses import replace

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs import recall
from fwpkm_jax.rules import SDM


def get_config() -> Experiment:
    parent = recall.get_config()
    memory = replace(
        parent.model.fast_weight,
        rule=SDM(
            num_subkeys=32,
            value_dim=64,
            num_writes=8,
            num_reads=8,
            write_norm="unit",
            read_norm="unit",
            # As FwPKM, whose query is paired with the next token's value and writes where it reads.
            keys="previous",
            read_start="writes",
        ),
        weight_by_gate=False,  # SDM projects the strength of a write by itself.
    )
    return replace(parent, model=replace(parent.model, fast_weight=memory), run_dir="runs/sdm")
