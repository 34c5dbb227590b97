"""Full attention in every layer, and FwPKM."""

import runpy
from pathlib import Path

from fwpkm_jax.config import Experiment

_PARENT = runpy.run_path(str(Path(__file__).with_name("gdn_swa.py")))


def get_config() -> Experiment:
    return _PARENT["variant"]("fa__fwpkm", mixers=("attention",) * 3, memory_layers=(2,))
