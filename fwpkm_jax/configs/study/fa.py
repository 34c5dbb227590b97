"""The study's model with full attention in every layer."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("fa", mixers=("attention",) * 3)
