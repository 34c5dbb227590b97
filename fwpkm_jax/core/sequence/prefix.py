"""Composition of the parts of a sequence: each device's summary after those before it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.sequence.axis import SequenceAxis


def parts_before(part: Any, join: Callable[[Any, Any], Any], *, axis: SequenceAxis) -> Any:
    """The summary of all parts before this device's; on the first device it has no meaning.

    Takes `ceil(log2(devices))` rounds, in each of which a device sends one summary.

    Args:
      part: this device's summary, a pytree of arrays.
      join: associative; the summary of two neighbours, the earlier one first.
    """
    part = axis.shift(part)  # Now device i has what part i - 1 does.
    reach = 1
    while reach < axis.size - 1:
        earlier = axis.shift(part, by=reach)
        joined = join(earlier, part)
        # Devices up to `reach` already have all parts before them.
        part = jax.tree.map(functools.partial(jnp.where, axis.index > reach), joined, part)
        reach *= 2
    return part
