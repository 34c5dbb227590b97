"""The study's backbone with both memories: PKM in the middle, FwPKM late."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("gdn_swa__pkm_fwpkm", pkm_layers=(1,), memory_layers=(2,))
