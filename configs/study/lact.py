"""LaCT in every layer, the window and chunks of the study's other models."""

import runpy
from pathlib import Path

from fwpkm_jax.config import Experiment

_PARENT = runpy.run_path(str(Path(__file__).with_name("gdn_swa.py")))


def get_config() -> Experiment:
    return _PARENT["variant"]("lact", mixers=("lact",) * 3)
