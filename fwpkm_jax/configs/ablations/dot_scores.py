"""Appendix D, "with dot-product scores": the paper left its numbers out, for it often diverges."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("dot_scores", rule={"score": "dot"})
