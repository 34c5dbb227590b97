"""Memory rules by name."""

from fwpkm_jax.rules.base import AbstractChunkRule, AbstractRule
from fwpkm_jax.rules.delta import DeltaRule
from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory

RULES: dict[str, type[AbstractRule]] = {
    "delta": DeltaRule,
    "fwpkm": FwPKM,
}

__all__ = ["RULES", "AbstractChunkRule", "AbstractRule", "DeltaRule", "FwPKM", "FwPKMMemory"]
