"""Falcon-3 and Falcon-3A: each token takes one step on the mean of the last tokens' losses."""

import abc
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput, Together
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import Form, LocalLoss, Starts, Tokens, given, squared
from fwpkm_jax.rules.matrix.falcon import AbstractFalcon
from fwpkm_jax.rules.matrix.windows import WindowState, last_tokens, writes


@dataclass(frozen=True, kw_only=True)
class AbstractFalconWindow(AbstractFalcon):
    """One step of Falcon on the mean loss of the last `window` tokens, at the memory before it.

    In chunks each token makes `window` writes. A token of strength 0 writes nothing and does not
    enter the window.
    """

    strength: ClassVar = True

    window: Count = 4
    """Tokens whose losses each token takes its step on, itself included."""

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike):
        return WindowState.empty(super().init(batch, heads, key, value, dtype=dtype), self.window)

    @abc.abstractmethod
    def size(self, keys: Array, entered: Array) -> Array:
        """What a step is divided by, of keys `[..., window, key]` and weights `[..., window]`."""

    def write(self, state: WindowState, token: Tokens) -> WindowState:
        keys, values, entered = state.window(token, jnp.ones_like(given(token.strength)))
        step = self._step(token, keys, entered)
        share = step * entered / _total(entered)
        change = values - keys @ state.matrix if self.delta else values
        matrix = (1 - step * self.ridge) * state.matrix + keys.T @ (share[:, None] * change)
        written = WindowState(matrix, keys[1:], values[1:], entered[1:])
        real = given(token.strength) != 0
        return jax.tree.map(lambda x, y: jnp.where(real, x, y), written, state)

    def losses(self, state: WindowState, token: Tokens) -> tuple[LocalLoss, ...]:
        keys, values, entered = state.window(token, jnp.ones_like(given(token.strength)))
        share = (entered / _total(entered))[:, None]

        def loss(matrix):
            if self.delta:
                told = squared(jnp.sqrt(share) * (values - keys @ matrix))
            else:
                told = -jnp.sum(share * values * (keys @ matrix))
            return told + self.ridge * squared(matrix)

        return (LocalLoss(loss, self._step(token, keys, entered)),)

    def chunked(
        self, tokens: Tokens, state: WindowState, starts: Starts = None
    ) -> RecurrenceOutput:
        keys, values, entered = self._windows(tokens, state, starts)
        step = self._step(tokens, keys, entered)
        kept = 1 - step * self.ridge
        share = step[..., None] * entered / _total(entered)
        written = share[..., None] * values
        if self.delta:
            # The shared algorithm decays before it measures the errors.
            written, share = kept[..., None, None] * values, share / kept[..., None]

        tokens = Tokens(tokens.query, writes(keys), writes(written), log_decay=jnp.log(kept))
        beta = Together(writes(share)) if self.delta else None
        output, matrix = self.recurrence(tokens, state.matrix, starts, beta=beta)
        last = (x[:, -1, :, 1:] for x in (keys, values, entered))
        return RecurrenceOutput(output, WindowState(matrix, *last))

    def _step(self, tokens: Tokens, keys: Array, entered: Array) -> Array:
        return self.step_of(tokens, self.size(keys, entered))

    def _windows(
        self, tokens: Tokens, state: WindowState, starts: Starts
    ) -> tuple[Array, Array, Array]:
        """The windows of all tokens, `[batch, length, heads, window, ...]`."""
        real = (given(tokens.strength) != 0).astype(tokens.key.dtype)
        return last_tokens((tokens.key, tokens.value, real), state[1:], starts)


@dataclass(frozen=True, kw_only=True)
class Falcon3(AbstractFalconWindow):
    """Falcon on the errors of a window, divided by the largest eigenvalue of its keys' products.

    References: arXiv:2608.27763.
    """

    form: ClassVar[Form] = Form(
        name="Falcon-3",
        right=r"$(1 - \eta_t\lambda)I - \tfrac{\eta_t}{c}\sum_{i>t-c} k_ik_i^\top$, "
        r"$\eta_t = \beta_t / (\mu_t + \lambda)$, "
        r"$\mu_t$ the largest eigenvalue of $\tfrac1c\sum_{i>t-c} k_ik_i^\top$",
        written=r"$\tfrac{\eta_t}{c}\sum_{i>t-c} v_ik_i^\top$",
        loss=r"$\tfrac1{2c}\sum_{i>t-c}\lVert v_i - Wk_i\rVert^2 "
        r"+ \tfrac{\lambda}{2}\lVert W\rVert^2$",
        step_size=r"$\eta_t$",
        source="arXiv:2608.27763",
    )
    delta: ClassVar = True

    def size(self, keys: Array, entered: Array) -> Array:
        keys = entered[..., None] * keys
        products = jnp.matmul(keys, keys.swapaxes(-1, -2), precision="highest")
        return jnp.linalg.eigvalsh(products)[..., -1] / _total(entered)[..., 0]


@dataclass(frozen=True, kw_only=True)
class Falcon3A(AbstractFalconWindow):
    """Falcon-3 that adds values in place of errors, divided by the keys' mean square.

    With a window of 1 it is Falcon-1A.

    References: arXiv:2608.27763.
    """

    form: ClassVar[Form] = Form(
        name="Falcon-3A",
        right=r"$(1 - \eta_t\lambda)I$, $\eta_t = \beta_t / (e_t + \lambda)$, "
        r"$e_t = \tfrac1c\sum_{i>t-c}\lVert k_i\rVert^2$",
        written=r"$\tfrac{\eta_t}{c}\sum_{i>t-c} v_ik_i^\top$",
        loss=r"$-\tfrac1c\sum_{i>t-c} v_i^\top Wk_i + \tfrac{\lambda}{2}\lVert W\rVert^2$",
        step_size=r"$\eta_t$",
        source="arXiv:2608.27763",
    )

    def size(self, keys: Array, entered: Array) -> Array:
        squares = jnp.sum(jnp.square(keys), axis=-1)
        return jnp.sum(entered * squares, axis=-1) / _total(entered)[..., 0]


def _total(entered: Array) -> Array:
    """How many tokens are in the windows, with an axis for these; at least a little."""
    total = jnp.sum(entered, axis=-1, keepdims=True)
    return jnp.where(total > 0, total, 1)
