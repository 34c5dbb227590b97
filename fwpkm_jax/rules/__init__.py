"""Memory rules: how a memory reads and writes. `base` holds the contract, `registry` the names."""

from typing import TYPE_CHECKING

from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.core.slots.options.retention import Retention
    from fwpkm_jax.rules.base import AbstractChunkRule, AbstractRule
    from fwpkm_jax.rules.fwmlp import FwMLP, FwMLPMemory
    from fwpkm_jax.rules.fwpkm import FwPKM, FwPKMMemory
    from fwpkm_jax.rules.lact import LaCTRule
    from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule
    from fwpkm_jax.rules.registry import DEFAULT_RULE, RULES, make_rule, register_rule
    from fwpkm_jax.rules.sdm import SDM, SDMMemory
    from fwpkm_jax.rules.titans import TitansMemory, TitansRule

__all__ = [
    "DEFAULT_RULE",
    "MATRIX_RULES",
    "RULES",
    "SDM",
    "AbstractChunkRule",
    "AbstractMatrixRule",
    "AbstractRule",
    "FwMLP",
    "FwMLPMemory",
    "FwPKM",
    "FwPKMMemory",
    "LaCTRule",
    "Retention",
    "SDMMemory",
    "TitansMemory",
    "TitansRule",
    "make_rule",
    "register_rule",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
