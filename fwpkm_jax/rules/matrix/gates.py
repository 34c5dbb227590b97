"""What a layer learns for the decays and strengths of a matrix memory, and what it projects."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array


class LearnedGates(NamedTuple):
    """What a layer learns, from which `gates` computes decays and strengths.

    Attributes:
      decay: a projection per head, or per key channel where the rule's `decay` is "key".
      strength: a projection per head and write, to as many numbers as the rule's `strength` says.
      log_rate: a vector, one number per head.
      decay_bias: initial bias of `decay` where the start is constant.
      strength_bias: initial bias of `strength` where the start is constant.
      decay_of_step: gives the bias of `decay` from a time step, for a start with drawn time steps
        (`core.recurrence.decay_starts`); None: `decay_bias`.
      strength_of_step: the same for `strength`, in a rule whose strength is its time step.
      key_of_step: the same for the keys before their features, in a rule whose keys are the shares
        forgotten; a constant start is then 0. None: keys have no bias.
    """

    decay: bool = False
    strength: bool = False
    log_rate: bool = False
    decay_bias: float = 0.0
    strength_bias: float = 0.0
    decay_of_step: Callable[[Array], Array] | None = None
    strength_of_step: Callable[[Array], Array] | None = None
    key_of_step: Callable[[Array], Array] | None = None


class GateInputs(NamedTuple):
    """The projections that `LearnedGates` asks for, in at least float32.

    Attributes:
      shape: batch, length, heads.
      decay: `[batch, length, heads]` or `[batch, length, heads, key]`.
      strength: `[batch, length * steps, heads]`, with a last axis where the rule's has one.
      log_rate: `[heads]`.
    """

    shape: tuple[int, int, int]
    decay: Array | None
    strength: Array | None
    log_rate: Array | None
