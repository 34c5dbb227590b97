"""Appendix D, "w/o addr loss": the reconstruction error moves keys and values."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("without_addressing_loss", rule={"key_loss": "reconstruction"})
