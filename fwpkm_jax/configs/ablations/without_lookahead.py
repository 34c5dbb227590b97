"""Appendix D, "w/o lookahead": a token writes its own value."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import ablation


def get_config() -> Experiment:
    return ablation("without_lookahead", rule={"lookahead": 0})
