"""The real size's backbone with PKM in place of the MLPs of layers 2 and 4."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.real_size.gdn import variant


def get_config() -> Experiment:
    return variant("gdn__pkm2_4")
