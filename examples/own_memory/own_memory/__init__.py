"""A memory and a token mixer that fwpkm_jax does not know; importing this package registers both.

A run names the package in `plugins`; whoever evaluates or resumes it names it, too, with
`--plugins own_memory`.
"""

from fwpkm_jax.layers.mixers import register_mixer
from fwpkm_jax.rules import register_rule
from own_memory.hebbian import Hebbian, HebbianInfo
from own_memory.moving_average import MovingAverage, MovingAverageConfig

__all__ = ["Hebbian", "HebbianInfo", "MovingAverage", "MovingAverageConfig"]

register_rule("hebbian", Hebbian)
register_mixer("moving_average", MovingAverageConfig())
