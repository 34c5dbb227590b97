"""Gradient steps on all slow weights while a text is read: dynamic evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax

from fwpkm_jax.literals import check_literals


@dataclass(frozen=True, kw_only=True)
class GradientSteps:
    """Gradient steps: `W <- W - learning_rate * gradient + decay * (trained W - W)` per chunk.

    The gradient is that of the chunk's mean loss. It does not reach back before the chunk: the
    caches of earlier chunks are constants.

    References: Krause et al. 2018, arXiv:1709.07432, Eq. 5.
    """

    learning_rate: float = 0.05
    """Learning rate of plain gradient descent."""
    decay: float = 0.0
    """Fraction of the distance to the trained weights by which each step moves back to them."""
    chunk_length: int = 64
    """Tokens per step."""
    reset: Literal["document", "never"] = "document"
    """When the weights are reset to the trained ones."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.learning_rate >= 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be at least 0.")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in 0 to 1.")
        if self.chunk_length < 1:
            raise ValueError(f"chunk_length={self.chunk_length} must be at least 1.")


def step_on(params: Any, gradients: Any, trained: Any, rates: tuple[Any, Any]) -> Any:
    """The weights after one step; `rates` are the learning rate and the decay."""
    learning_rate, decay = rates

    def step(weight: jax.Array, gradient: jax.Array, trained: jax.Array) -> jax.Array:
        return weight - learning_rate * gradient + decay * (trained - weight)

    return jax.tree.map(step, params, gradients, trained)
