"""The study's backbone with a fast-weight product-key memory before its last layer."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("gdn_swa__fwpkm", memory_layers=(2,))
