"""Full attention and FwPKM; in nine of ten training steps attention sees the window alone."""

from fwpkm_jax.config import Experiment
from fwpkm_jax.configs.study.gdn_swa import variant


def get_config() -> Experiment:
    return variant(
        "fa__fwpkm__pswa",
        mixers=("attention",) * 3,
        memory_layers=(2,),
        training={"window_probability": 0.9},
    )
