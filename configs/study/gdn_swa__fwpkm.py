"""The study's backbone with a fast-weight product-key memory before its last layer."""

import runpy
from pathlib import Path

from fwpkm_jax.config import Experiment

_PARENT = runpy.run_path(str(Path(__file__).with_name("gdn_swa.py")))


def get_config() -> Experiment:
    return _PARENT["variant"]("gdn_swa__fwpkm", memory_layers=(2,))
