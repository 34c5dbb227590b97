"""The study's backbone with a product-key memory of slow weights in place of its last MLP."""

import runpy
from pathlib import Path

from fwpkm_jax.config import Experiment

_PARENT = runpy.run_path(str(Path(__file__).with_name("gdn_swa.py")))


def get_config() -> Experiment:
    return _PARENT["variant"]("gdn_swa__pkm", pkm_layers=(2,))
