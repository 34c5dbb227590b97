"""The study's model with FwPKM, trained with the write that forgets least text.

`plain_text` trains it: slots move less the more they hold, and every chunk takes six value steps.
"""

from dataclasses import replace

from fwpkm_jax.config import Experiment, load_config
from fwpkm_jax.rules import FwPKM, Retention


def get_config() -> Experiment:
    config = load_config("study/gdn_swa__fwpkm")
    fast_weight = config.model.fast_weight
    assert isinstance(fast_weight.rule, FwPKM)
    rule = replace(fast_weight.rule, retention=Retention(hardening=1.0), inner_steps=6)
    model = replace(config.model, fast_weight=replace(fast_weight, rule=rule))
    return replace(config, model=model)
