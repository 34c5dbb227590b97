"""The study's backbone with a product-key memory of slow weights in place of its last MLP."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant("gdn_swa__pkm", pkm_layers=(2,))
