"""Matrix memories by name: rules whose memory is a matrix per sequence and head."""

from collections.abc import Mapping

from fwpkm_jax.rules.matrix.base import AbstractMatrixRule, Tokens
from fwpkm_jax.rules.registry import RulesOf

MATRIX_RULES: Mapping[str, type[AbstractMatrixRule]] = RulesOf(AbstractMatrixRule)
"""The classes of the registered matrix rules by name, those of other packages included."""

__all__ = ["MATRIX_RULES", "AbstractMatrixRule", "Tokens"]
