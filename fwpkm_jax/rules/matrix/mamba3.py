"""Mamba-3: a decay and a rotation per token, which writes the pair before it once more."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.chunk_decay import LOWEST_LOG_DECAY
from fwpkm_jax.core.recurrence.decay_starts import softplus_bias
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    Starts,
    Tokens,
    agreement,
    given,
)
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.windows import last_tokens, writes

_SLOWEST_RATE = 1e-4  # Published, as the factor pi of the angles.


class Mamba3State(NamedTuple):
    """The memory, and the last token's key and value."""

    matrix: Float[Array, "*dims key value"]
    key: Float[Array, "*dims key"]
    value: Float[Array, "*dims value"]


@dataclass(frozen=True, kw_only=True)
class Mamba3(AbstractMatrixRule):
    """Writes the last pair again by c, decays and turns the memory, then writes its own pair by γ.

    `strength` holds γ, c and an angle θ for each pair of neighbouring key channels. R(θ) turns such
    pairs. A turn of the memory is one of the keys and queries by the sum of the angles, so that
    chunks take two additive writes per token. A token whose strengths are all 0 is none: the pair
    before it stays the last. The rule alone, with one input and one output per head: the published
    block also adds learned biases to keys and queries, turns half of the channels by default, and
    adds its input to what is read.

    References: arXiv:2603.15569; state-spaces/mamba, `tests/ops/triton/test_mamba3_siso.py`.
    """

    form: ClassVar[Form] = Form(
        name="Mamba-3",
        right=r"$\alpha_tR(\theta_t)$",
        written=r"$\gamma_t vk^\top + c_t v_{t-1}k_{t-1}^\top \alpha_tR(\theta_t)$",
        loss=r"$-c_t v_{t-1}^\top Wk_{t-1}$, then $\tfrac12\langle W, W(I - F)\rangle$, then "
        r"$-\gamma_t v^\top Wk + \tfrac12\langle W, W(I - \alpha_tG_t)\rangle$, "
        r"$F$ and $G_t$ reflections, $FG_t = R(\theta_t)$",
        source="arXiv:2603.15569",
    )
    decay: ClassVar = "head"
    strength: ClassVar = ("head", "head", "pair")
    learned_gates: ClassVar = LearnedGates(
        decay=True, strength=True, decay_bias=-4.0, decay_of_step=softplus_bias
    )

    feature_map: FeatureMap = "l2"

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike):
        return Mamba3State(
            matrix=super().init(batch, heads, key, value, dtype=dtype),
            key=jnp.zeros((batch, heads, key), dtype),
            value=jnp.zeros((batch, heads, value), dtype),
        )

    def write(self, state: Mamba3State, token: Tokens) -> Mamba3State:
        own, again, angle = self.strengths(token)
        matrix = state.matrix + jnp.outer(state.key, again * state.value)
        matrix = jnp.exp(given(token.log_decay)) * _turn_keys(matrix, -angle)
        matrix += jnp.outer(token.key, own * token.value)
        real = jnp.any(given(token.strength) != 0)
        last = (jnp.where(real, token.key, state.key), jnp.where(real, token.value, state.value))
        return Mamba3State(matrix, *last)

    def losses(self, state: Mamba3State, token: Tokens) -> tuple[LocalLoss, ...]:
        own, again, angle = self.strengths(token)
        before = token._replace(key=state.key)
        share = jnp.exp(given(token.log_decay))

        def first(matrix):
            return jnp.sum(matrix * (matrix - _flip(matrix))) / 2

        def second(matrix):
            turned = _turn_keys(_flip(matrix), -angle)
            return jnp.sum(matrix * (matrix - share * turned)) / 2 - agreement(
                matrix, token, own * token.value
            )

        # A turn is no gradient step, but two reflections, which are symmetric, make one.
        add = LocalLoss(lambda matrix: -agreement(matrix, before, again * state.value))
        return add, LocalLoss(first), LocalLoss(second)

    def chunked(
        self, tokens: Tokens, state: Mamba3State, starts: Starts = None
    ) -> RecurrenceOutput:
        own, again, angle = self.strengths(tokens)
        total = jnp.cumsum(angle, axis=1)
        real = jnp.any(given(tokens.strength) != 0, axis=-1).astype(angle.dtype)
        keys, values, _ = last_tokens(
            (_turn(tokens.key, total), tokens.value, real),
            (state.key[:, :, None], state.value[:, :, None], jnp.ones_like(real[:, 0, :, None])),
            starts,
        )
        # The shared algorithm decays before both writes, this rule between them.
        again = jnp.exp(given(tokens.log_decay))[..., None] * again
        weights = jnp.stack([again, own], axis=3)

        tokens = Tokens(
            _turn(tokens.query, total), writes(keys), writes(weights * values), tokens.log_decay
        )
        output, matrix = self.recurrence(tokens, state.matrix, starts)
        back = -total[:, -1]
        last = _turn(keys[:, -1, :, 1], back), values[:, -1, :, 1]
        return RecurrenceOutput(output, Mamba3State(_turn_keys(matrix, back), *last))

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        step = jax.nn.softplus(given(inputs.decay))
        share, rate, angle = jnp.split(given(inputs.strength), [1, 2], axis=-1)
        rate = jnp.maximum(jax.nn.softplus(rate[..., 0]), _SLOWEST_RATE)
        log_decay = jnp.maximum(-rate * step, LOWEST_LOG_DECAY)
        step, share = step[..., None], jax.nn.sigmoid(share)
        angle = math.pi * jnp.tanh(angle) * step
        return log_decay, jnp.concatenate([share * step, (1 - share) * step, angle], axis=-1)


def _turn(x: Float[Array, "*dims key"], angle: Float[Array, "*#dims pairs"]) -> Array:
    """Neighbouring channels turned by the angle of their pair; an odd last channel stays."""
    pairs = 2 * angle.shape[-1]
    first, second = x[..., 0:pairs:2], x[..., 1:pairs:2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return jnp.concatenate([turned.reshape(*x.shape[:-1], pairs), x[..., pairs:]], axis=-1)


def _turn_keys(
    matrix: Float[Array, "*dims key value"], angle: Float[Array, "*dims pairs"]
) -> Array:
    """A memory whose keys are turned."""
    return _turn(matrix.swapaxes(-1, -2), angle[..., None, :]).swapaxes(-1, -2)


def _flip(matrix: Float[Array, "key value"]) -> Array:
    """The second channel of each pair of neighbouring key channels times -1."""
    key = matrix.shape[0]
    second = (jnp.arange(key) % 2 == 1) & (jnp.arange(key) < key - key % 2)
    return jnp.where(second[:, None], -matrix, matrix)
