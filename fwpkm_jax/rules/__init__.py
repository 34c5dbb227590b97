"""Memory rules by name."""

from fwpkm_jax.rules.base import AbstractChunkRule, AbstractRule
from fwpkm_jax.rules.delta import DeltaRule
from fwpkm_jax.rules.fwmlp import FwMLP, FwMLPMemory
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory

RULES: dict[str, type[AbstractRule]] = {
    "delta": DeltaRule,
    "fwmlp": FwMLP,
    "fwpkm": FwPKM,
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
]
