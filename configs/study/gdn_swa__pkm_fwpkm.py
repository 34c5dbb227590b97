"""The study's backbone with both memories: PKM in the middle, FwPKM late."""

import runpy
from pathlib import Path

from fwpkm_jax.config import Experiment

_PARENT = runpy.run_path(str(Path(__file__).with_name("gdn_swa.py")))


def get_config() -> Experiment:
    return _PARENT["variant"]("gdn_swa__pkm_fwpkm", pkm_layers=(1,), memory_layers=(2,))
