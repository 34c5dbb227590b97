"""Gated DeltaNet and KDA with a preconditioner: key channels that carry much take shorter steps."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.chunk_decay import softplus_decay
from fwpkm_jax.core.recurrence.linear_recurrence import Erasure, RecurrenceOutput
from fwpkm_jax.literals import Bound, Count
from fwpkm_jax.rules.matrix.base import (
    Form,
    GateInputs,
    LocalLoss,
    Starts,
    Tokens,
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.gated_deltanet import AbstractGatedDelta, projected_decay

_FADE_BIAS = -4.6  # softplus of it is 0.01, in the middle of the published time steps.


class PreconditionedState(NamedTuple):
    """The memory, and A, the decayed sum of the squares of the keys."""

    matrix: Float[Array, "*dims key value"]
    curvature: Float[Array, "*dims key"]


@dataclass(frozen=True, kw_only=True)
class AbstractPreconditioned(AbstractGatedDelta):
    """A decay, then a delta step under M∘k in place of k, where M is larger the smaller A is.

    A <- e^-r A + p k∘k sums the squares of the keys. M = reach^-s, s = d / (1 + |d|) with
    d = log(A + eps) - center, lies between 1 / reach and reach. `strength` holds β, p and r. The
    published layer learns the center of each head, and the rate of r apart from that of the decay.
    """

    strength: ClassVar = ("head", "head", "head")

    reach: Annotated[float, Bound(1)] = 1.5
    """The largest number that multiplies a key channel, at least 1; above 2 steps may overshoot."""
    center: float = -0.2
    """The log of the sum of squares that leaves a key channel as it is."""
    eps: Annotated[float, Bound(1e-12)] = 1e-6
    """Added to the sum of squares before the logarithm, at least 1e-12."""

    def init(
        self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike
    ) -> PreconditionedState:
        matrix = super().init(batch, heads, key, value, dtype=dtype)
        return PreconditionedState(matrix, jnp.zeros((batch, heads, key), dtype))

    def write(self, state: PreconditionedState, token: Tokens) -> PreconditionedState:
        strength, enters, fades = self.strengths(token)
        curvature = jnp.exp(-fades) * state.curvature + enters * jnp.square(token.key)
        kept = self._rows(jnp.exp(given(token.log_decay)))[:, None] * state.matrix
        at = strength * self._multiplier(curvature) * token.key
        matrix = kept + jnp.outer(at, token.value - token.key @ kept)
        return PreconditionedState(matrix, curvature)

    def losses(self, state: PreconditionedState, token: Tokens) -> tuple[LocalLoss, ...]:
        step = self.strengths(token)[0] * self._multiplier(self.write(state, token).curvature)
        forget = self._rows(forgotten(token.log_decay))[:, None]

        def error(matrix):
            return squared(token.value - token.key @ matrix)

        decay = LocalLoss(lambda matrix: jnp.sum(forget * jnp.square(matrix)) / 2)
        return decay, LocalLoss(error, step[:, None])

    def chunked(
        self, tokens: Tokens, state: PreconditionedState, starts: Starts = None
    ) -> RecurrenceOutput:
        strength, enters, fades = self.strengths(tokens)
        kept = jnp.exp(-fades)
        if starts is not None:
            kept = jnp.where(starts[:, :, None, None], 0, kept)

        def join(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        pairs = kept, enters * jnp.square(tokens.key)
        kept, added = jax.lax.associative_scan(join, pairs, axis=1)
        curvature = kept * state.curvature[:, None] + added
        at = strength * self._multiplier(curvature) * tokens.key
        # What the key reads after the token's decay, in terms of the memory before it.
        erasure = Erasure(self._rows(jnp.exp(given(tokens.log_decay))) * tokens.key, at)
        out = self.recurrence(tokens._replace(key=at), state.matrix, starts, erasure=erasure)
        end = PreconditionedState(out.final_state, curvature[:, -1])
        return RecurrenceOutput(out.output, end)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        strength, enters, fades = jnp.split(given(inputs.strength), 3, axis=-1)
        strength = (2 if self.negative_eigenvalues else 1) * jax.nn.sigmoid(strength)
        fades = -softplus_decay(given(inputs.log_rate)[None, None, :, None], fades + _FADE_BIAS)
        return projected_decay(inputs), jnp.concatenate(
            [strength, jax.nn.sigmoid(enters), fades], axis=-1
        )

    def _multiplier(self, curvature: Array) -> Array:
        """M."""
        distance = jnp.log(curvature + self.eps) - self.center
        return self.reach ** (-distance / (1 + jnp.abs(distance)))

    def _rows(self, share: Array) -> Array:
        """A number per head or key channel, with an axis for the key channels."""
        return share if self.decay == "key" else share[..., None]


def _form(name: str, kept: str, loss: str) -> Form:
    return Form(
        name=name,
        right=rf"${kept}(I - \beta_t k(M_t\circ k)^\top)$, "
        r"$M_t = \mathrm{squash}(A_t)$, $A_t = e^{-r_t}A_{t-1} + p_t k\circ k$",
        written=r"$\beta_t v(M_t\circ k)^\top$",
        loss=loss + r", then $\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$1$, then $\beta_tM_t$ per key channel",
        source="arXiv:2604.21100",
    )


@dataclass(frozen=True, kw_only=True)
class PreconditionedGatedDeltaNet(AbstractPreconditioned):
    """Gated DeltaNet with the preconditioner: one decay per head.

    References: arXiv:2604.21100.
    """

    form: ClassVar[Form] = _form(
        "preconditioned Gated DeltaNet", r"\alpha_t", r"$\tfrac{1-\alpha_t}{2}\lVert W\rVert^2$"
    )
    decay: ClassVar = "head"


@dataclass(frozen=True, kw_only=True)
class PreconditionedKDA(AbstractPreconditioned):
    """KDA with the preconditioner: a decay per key channel.

    References: arXiv:2604.21100.
    """

    form: ClassVar[Form] = _form(
        "preconditioned KDA",
        r"\mathrm{Diag}(\alpha_t)",
        r"$\tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t})\rVert^2$",
    )
    decay: ClassVar = "key"

    chunk_size: Count = 16  # As GLA's.
