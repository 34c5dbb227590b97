"""Appendix D, "w/o value norm": targets are not standardised."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("without_value_norm", value_norm="none")
