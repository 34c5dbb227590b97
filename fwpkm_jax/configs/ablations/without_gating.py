"""Appendix D, "w/o gating": the read is added to the value, every token writes in full."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("without_gating", gate_output=False, weight_by_gate=False)
