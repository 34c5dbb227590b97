"""Falcon-2 and Falcon-2A: Falcon with a step of its own for each value channel."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import Form, LocalLoss, Starts, State, Tokens, squared
from fwpkm_jax.rules.matrix.falcon import AbstractFalcon
from fwpkm_jax.rules.matrix.gated_deltanet_channels import chunks_by_channel

_DECAYS = r"$I - \lambda\,\mathrm{Diag}(\eta_t)$, $\eta_t = \beta_t / (\lVert k\rVert^2 + \lambda)$"


@dataclass(frozen=True, kw_only=True)
class Falcon2(AbstractFalcon):
    """Falcon whose step η differs between value channels, by `strength` (β) of each.

    Every value channel is a memory of its own to the shared algorithm, as in
    `GatedDeltaNetChannels`, at the same cost.

    References: arXiv:2608.27763.
    """

    form: ClassVar[Form] = Form(
        name="Falcon-2",
        right=r"$(1 - \eta_{t,i}\lambda)I - \eta_{t,i} kk^\top$ in row $i$, "
        r"$\eta_t = \beta_t / (\lVert k\rVert^2 + \lambda)$",
        written=r"$(\eta_t\circ v)k^\top$",
        loss=r"$\tfrac12\lVert v - Wk\rVert^2 + \tfrac{\lambda}{2}\lVert W\rVert^2$",
        step_size=r"$\eta_t$ per value channel",
        source="arXiv:2608.27763",
    )
    strength: ClassVar = "value"
    delta: ClassVar = True

    def write(self, state: State, token: Tokens) -> State:
        step = self.step(token)
        error = token.value - token.key @ state
        return (1 - step * self.ridge)[None] * state + jnp.outer(token.key, step * error)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state

        def loss(matrix):
            return squared(token.value - token.key @ matrix) + self.ridge * squared(matrix)

        return (LocalLoss(loss, self.step(token)[None]),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        return chunks_by_channel(self.recurrence_inputs(tokens), state, starts, self.chunk_size)


@dataclass(frozen=True, kw_only=True)
class Falcon2A(AbstractFalcon):
    """Falcon-2 that adds its value in place of its error.

    Value channels fade apart: the memory is computed with keys and values exchanged, and read along
    the keys.

    References: arXiv:2608.27763.
    """

    form: ClassVar[Form] = Form(
        name="Falcon-2A",
        left=_DECAYS,
        right="$I$",
        written=r"$(\eta_t\circ v)k^\top$",
        loss=r"$-v^\top Wk + \tfrac{\lambda}{2}\lVert W\rVert^2$",
        step_size=r"$\eta_t$ per value channel",
        source="arXiv:2608.27763",
    )
    strength: ClassVar = "value"

    chunk_size: Count = 16  # As GLA's.

    def write(self, state: State, token: Tokens) -> State:
        step = self.step(token)
        return (1 - step * self.ridge)[None] * state + jnp.outer(token.key, step * token.value)

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        del state

        def loss(matrix):
            return self.ridge * squared(matrix) - token.key @ matrix @ token.value

        return (LocalLoss(loss, self.step(token)[None]),)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        step = self.step(tokens)
        exchanged = Tokens(
            *(tokens.query, step * tokens.value, tokens.key), jnp.log1p(-step * self.ridge)
        )
        out = self.recurrence(exchanged, state.swapaxes(-1, -2), starts, read="value")
        return out._replace(final_state=out.final_state.swapaxes(-1, -2))
