"""Full attention in every layer, and FwPKM."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("fa__fwpkm", mixers=("attention",) * 3, memory_layers=(2,))
