"""LaCT (Table 1): window of 2,048 tokens and fast networks written every 512, in all layers."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.paper import paper_experiment


def get_config() -> Experiment:
    return paper_experiment("lact")
