"""Checks that a memory rule or a token mixer, of this or another package, keeps its contract.

`check_rule(rule)` and `check_mixer(config)` need neither pytest nor this repository's tests. They
raise an AssertionError that names every broken property.

Example:
  >>> from fwpkm_jax.rules import FwMLP
  >>> from fwpkm_jax.testing import check_rule
  >>> check_rule(FwMLP.tiny(), properties=["rule_is_a_frozen_value"])
"""

from fwpkm_jax.testing.mixers import MIXER_PROPERTIES, check_mixer
from fwpkm_jax.testing.rules import check_rule, rule_properties

__all__ = ["MIXER_PROPERTIES", "check_mixer", "check_rule", "rule_properties"]
