"""mLSTM: exponential input gates, kept in range by a running scale."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.chunk_decay import LOWEST_LOG_DECAY
from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.core.recurrence.transition import log_kept
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LearnedGates,
    LocalLoss,
    Starts,
    Tokens,
    agreement,
    forgotten,
    given,
    squared,
)
from fwpkm_jax.rules.matrix.normalizer import with_one


class MLSTMState(NamedTuple):
    """The memory as `exp(log_scale) * matrix`; the matrix's last column is the normaliser."""

    matrix: Float[Array, "*dims key wider"]
    log_scale: Float[Array, "*dims"]


class MLSTMTransition(NamedTuple):
    """What tokens do to a memory, a `core.recurrence.transition.Transition`.

    Attributes:
      log_kept: log of the share of the memory kept, before any scale.
      end: the memory of these tokens alone; its scale is the largest weight among them.
    """

    log_kept: Float[Array, "*dims"]
    end: MLSTMState

    def then(self, later: "MLSTMTransition") -> "MLSTMTransition":
        # Logarithms, because the product of the shares underflows over a long part.
        return MLSTMTransition(self.log_kept + later.log_kept, later.after(self.end))

    def after(self, state: MLSTMState) -> MLSTMState:
        # Both memories over the larger of both scales, so that neither exponential overflows.
        kept = self.log_kept + state.log_scale
        log_scale = jnp.maximum(kept, self.end.log_scale)
        old, new = (jnp.exp(x - log_scale) for x in (kept, self.end.log_scale))
        matrix = old[..., None, None] * state.matrix + new[..., None, None] * self.end.matrix
        return MLSTMState(matrix, log_scale)


@dataclass(frozen=True, kw_only=True)
class MLSTM(AbstractMatrixRule):
    """Decays by f and writes with weight i; `strength` is log i, of any size.

    Both gates are taken relative to the largest weight so far, m_t = max(log f_t + m_{t-1},
    log i_t), which the state keeps and the read undoes. The published block's output gate is the
    layer's.

    References: Beck et al. 2024, arXiv:2405.04517.
    """

    form: ClassVar[Form] = Form(
        name="mLSTM",
        right="$f_t I$",
        written=r"$i_t vk^\top$",
        read=r"$Wq / \max(\lvert n^\top q\rvert, 1)$, $n$ as $W$ with $v = 1$",
        loss=r"$-i_t v^\top Wk + \tfrac{1-f_t}{2}\lVert W\rVert^2$",
        source="arXiv:2405.04517",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    no_strength: ClassVar = -jnp.inf
    transition: ClassVar = "other"  # `part` has its own.
    learned_gates: ClassVar = LearnedGates(
        decay=True, strength=True, decay_bias=4.0, decay_of_step=sigmoid_bias
    )

    convolution: bool = True

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> MLSTMState:
        # The last column is n, the sum of the keys.
        matrix = jnp.zeros((batch, heads, key, value + 1), dtype)
        return MLSTMState(matrix, jnp.zeros((batch, heads), dtype))

    def write(self, state: MLSTMState, token: Tokens) -> MLSTMState:
        log_kept, log_written, log_scale = self._relative(state, token)
        outer = jnp.outer(token.key, with_one(token.value))
        matrix = jnp.exp(log_kept) * state.matrix + jnp.exp(log_written) * outer
        return MLSTMState(matrix, log_scale)

    def read(self, state: MLSTMState, token: Tokens):
        return _bounded(token.query @ state.matrix, state.log_scale)

    def losses(self, state: MLSTMState, token: Tokens) -> tuple[LocalLoss, ...]:
        log_kept, log_written, _ = self._relative(state, token)
        forget, value = forgotten(log_kept), jnp.exp(log_written) * with_one(token.value)
        return (LocalLoss(lambda m: forget * squared(m) - agreement(m, token, value)),)

    def chunked(self, tokens: Tokens, state: MLSTMState, starts: Starts = None) -> RecurrenceOutput:
        log_f, log_i = given(tokens.log_decay), given(tokens.strength)
        # All scales come first; relative to them the recurrence is a plain decay.
        scales = _running_scale(log_f, log_i, state.log_scale, starts)
        before, after = scales[:, :-1], scales[:, 1:]
        if starts is not None:
            before = jnp.where(starts[:, :, None], 0, before)  # The scale of an empty memory.
        tokens = tokens._replace(
            value=jnp.exp(log_i - after)[..., None] * with_one(tokens.value),
            log_decay=log_f + before - after,
        )
        out = super().chunked(tokens, state.matrix, starts)
        end = MLSTMState(out.final_state, scales[:, -1])
        return RecurrenceOutput(_bounded(out.output, after), end)

    def part(self, tokens: Tokens, starts: Starts = None) -> "MLSTMTransition":
        batch, _, heads, width = tokens.key.shape
        dtype = tokens.key.dtype
        empty = self.init(batch, heads, width, tokens.value.shape[-1], dtype=dtype)
        # So low that the scale at the end is that of the tokens' own writes.
        empty = empty._replace(log_scale=jnp.full_like(empty.log_scale, LOWEST_LOG_DECAY))
        end = self.run(tokens, empty, starts).final_state
        kept = log_kept(tokens.log_decay, starts, like=tokens.key)
        return MLSTMTransition(kept[..., 0], end)

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return jax.nn.log_sigmoid(given(inputs.decay)), given(inputs.strength)

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        # A read's divisor is at least 1, so the keys' scale matters; this is the published one.
        query, key, value = super().features(query, key, value)
        width = key.shape[-1] ** 0.5
        return query * width, key / width, value

    @staticmethod
    def _relative(state: MLSTMState, token: Tokens) -> tuple[Array, Array, Array]:
        """Logarithms of both gates over the scale after the token, and of that scale."""
        log_kept = given(token.log_decay) + state.log_scale
        log_scale = jnp.maximum(log_kept, given(token.strength))
        return log_kept - log_scale, given(token.strength) - log_scale, log_scale


def _running_scale(
    log_f: Float[Array, "batch length heads"],
    log_i: Float[Array, "batch length heads"],
    start: Float[Array, "batch heads"],
    starts: Starts = None,
) -> Float[Array, "batch after heads"]:
    """m before the first and after each token, by a scan over pairs in max and plus."""

    def join(first, second):
        return first[0] + second[0], jnp.maximum(first[1] + second[0], second[1])

    if starts is not None:
        # The scale of an empty memory is 0; earlier scales do not matter.
        at = starts[:, :, None]
        log_i = jnp.where(at, jnp.maximum(log_f, log_i), log_i)
        log_f = jnp.where(at, -jnp.inf, log_f)
    # m_t = max(log f_t + m_{t-1}, log i_t) is linear in the max-plus algebra.
    kept, largest = jax.lax.associative_scan(join, (log_f, log_i), axis=1)
    start = start[:, None]
    return jnp.concatenate([start, jnp.maximum(kept + start, largest)], axis=1)


def _bounded(read: Float[Array, "*dims wider"], log_scale: Float[Array, "*dims"]) -> Array:
    """The read over its last entry, which is bounded below by 1 before scaling."""
    # The square of the bound, in the gradient, stays within the range of numbers, times others.
    # The published code adds 1e-6 to the divisor instead.
    limit = 0.25 * float(np.log(jnp.finfo(read.dtype).max))
    bound = jnp.exp(-jnp.clip(log_scale, -limit, limit))[..., None]
    return read[..., :-1] / jnp.maximum(jnp.abs(read[..., -1:]), bound)
