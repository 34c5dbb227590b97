"""Memory rules by name."""

from fwpkm_jax.core.slots.retention import Retention
from fwpkm_jax.rules.base import AbstractChunkRule, AbstractRule
from fwpkm_jax.rules.delta import DeltaRule
from fwpkm_jax.rules.fwmlp import FwMLP, FwMLPMemory
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory
from fwpkm_jax.rules.lact import LaCTRule
from fwpkm_jax.rules.titans import TitansMemory, TitansRule

RULES: dict[str, type[AbstractRule]] = {
    "delta": DeltaRule,
    "fwmlp": FwMLP,
    "fwpkm": FwPKM,
    "lact": LaCTRule,
    "titans": TitansRule,
}

__all__ = [
    "RULES",
    "AbstractChunkRule",
    "AbstractRule",
    "DeltaRule",
    "FwMLP",
    "FwMLPMemory",
    "FwPKM",
    "FwPKMMemory",
    "LaCTRule",
    "Retention",
    "TitansMemory",
    "TitansRule",
]
