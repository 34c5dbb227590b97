"""An evaluation that fwpkm_jax does not know; importing this package registers it."""

from fwpkm_jax.evaluation import register_evaluation
from own_evaluation.repeats import REPEATS, RepeatsConfig

__all__ = ["REPEATS", "RepeatsConfig"]

register_evaluation(REPEATS)
