"""Appendix D, "w/ 4 heads x Top-8": each token reads 8 slots by each of four queries."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("four_heads_top8", rule={"num_heads": 4})
