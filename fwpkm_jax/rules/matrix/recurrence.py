"""Rules whose write is a step of the shared recurrence, and the losses of its steps."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    LocalLoss,
    State,
    Tokens,
    agreement,
    forgotten,
    given,
    squared,
)


@dataclass(frozen=True, kw_only=True)
class AbstractRecurrenceRule(AbstractMatrixRule):
    """A rule of which `decay`, `delta` and `recurrence_inputs` say everything.

    The memory decays by `log_decay`. Then the value is added under its key, or with `delta` the
    value that the key reads moves towards it by the share `strength`.
    """

    def write(self, state: State, token: Tokens) -> State:
        token = self.recurrence_inputs(token)
        if token.log_decay is not None:
            # A decay per key channel does not commute with a delta step, so it comes first.
            state = _of_rows(jnp.exp(token.log_decay)) * state
        if self.delta:
            return delta_step(state, token.key, token.value, given(token.strength))
        return state + jnp.outer(token.key, token.value)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state
        token = self.recurrence_inputs(token)
        forget = 0.0 if token.log_decay is None else _of_rows(forgotten(token.log_decay))

        def decay(matrix):
            return jnp.sum(forget * jnp.square(matrix)) / 2

        if not self.delta:
            return (LocalLoss(lambda matrix: decay(matrix) - agreement(matrix, token)),)
        step = token.key, token.value, given(token.strength)
        if token.log_decay is None:
            return (error_loss(*step),)
        if self.decay == "head":
            return (gated_error_loss(token.log_decay, *step),)
        # With a decay per channel the transition is not symmetric, so that no single loss has it as
        # its gradient step.
        return LocalLoss(decay), error_loss(*step)


def _of_rows(share: Array) -> Array:
    """A share per head, or per key channel and then of each row of the memory."""
    return share[:, None] if share.ndim else share


def delta_step(state: Array, key: Array, value: Array, strength: Array) -> Array:
    """`W + β (v - W k) k^T`, of the transposed W that is the state."""
    return state + strength * jnp.outer(key, value - key @ state)


def error_loss(key: Array, value: Array, strength: Array) -> LocalLoss:
    """The loss whose gradient step is `delta_step`."""
    return LocalLoss(lambda matrix: squared(value - key @ matrix), strength)


def gated_error_loss(
    log_decay: Array | None, key: Array, value: Array, strength: Array
) -> LocalLoss:
    """One loss for a decay and the delta step after it, at the memory before both."""
    share = jnp.exp(given(log_decay))

    def loss(matrix):
        # Of gradient -β (v - α W k) k^T + (1 - α) W: a step of 1 decays and corrects at once.
        error = squared(value - share * (key @ matrix))
        return strength / share * error + forgotten(log_decay) * squared(matrix)

    return LocalLoss(loss)
