"""LaCT in every layer, the window and chunks of the study's other models."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("lact", mixers=("lact",) * 3)
