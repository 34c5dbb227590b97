"""Appendix D, "w/o loss weight": the gate mixes the output but weighs no write."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("without_loss_weight", weight_by_gate=False)
