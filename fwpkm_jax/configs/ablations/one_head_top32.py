"""Appendix D, "w/ 1 head x Top-32": each token reads 32 slots by one query."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("one_head_top32", rule={"top_k": 32})
