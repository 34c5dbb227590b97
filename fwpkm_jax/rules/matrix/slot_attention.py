"""Slots that fade and are overwritten, read by a softmax over them: gated slot attention, Raven."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.literals import Count, ShareAboveZero
from fwpkm_jax.rules.matrix.base import (
    Form,
    GateInputs,
    LearnedGates,
    Starts,
    State,
    Tokens,
    forgotten,
    given,
)
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES, projected_decay
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule

_TEMPERATURE = 8  # The published root of the sigmoid.


@dataclass(frozen=True, kw_only=True)
class AbstractSlotAttention(AbstractRecurrenceRule):
    """As many slots as a key is wide, each with a key and a value; a softmax over slots reads.

    A token moves each slot towards its own key and value by the share that the slot forgets. The
    state is `[slot, key + value]`: a memory whose keys are these shares and whose values are the
    tokens' keys and values side by side. Its first columns are read along the slots with the query,
    the others with the softmax of that: two passes of the shared algorithm.
    """

    transition: ClassVar = "fades"
    value_map: ClassVar = "silu"

    feature_map: FeatureMap = "silu"
    chunk_size: Count = 16  # As GLA's.

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        return jnp.zeros((batch, heads, key, key + value), dtype)

    def read(self, state: State, token: Tokens) -> Float[Array, " value"]:
        width = token.query.shape[-1]
        slots = jax.nn.softmax(state[:, :width] @ token.query)
        return slots @ state[:, width:]

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        width = tokens.query.shape[-1]
        written = self.recurrence_inputs(tokens)

        def chunk(query: Array, part: slice, **read) -> RecurrenceOutput:
            chosen = written._replace(query=query, value=written.value[..., part])
            return self.recurrence(chosen, state[..., part], starts, **read)

        met, keys = chunk(tokens.query, slice(width), read="value")
        output, values = chunk(jax.nn.softmax(met), slice(width, None))
        return RecurrenceOutput(output, jnp.concatenate([keys, values], axis=-1))

    def overwriting(self, tokens: Tokens, log_decay: Array) -> Tokens:
        """Tokens that write the share that each slot forgets."""
        both = jnp.concatenate([tokens.key, tokens.value], axis=-1)
        return tokens._replace(key=forgotten(log_decay), value=both, log_decay=log_decay)


_READ = r"$W_v\,\mathrm{softmax}(W_k^\top q)$"
_ERROR = r"$\tfrac12\sum_i (1-\alpha_{t,i})\lVert (k, v) - We_i\rVert^2$"


@dataclass(frozen=True, kw_only=True)
class GatedSlotAttention(AbstractSlotAttention):
    """Each slot forgets a learned share at each token, and takes on as much of the token.

    References: Zhang et al. 2024, arXiv:2409.07146.
    """

    form: ClassVar[Form] = Form(
        name="gated slot attention",
        right=r"$\mathrm{Diag}(\alpha_t)$",
        written=r"$(k, v)(1-\alpha_t)^\top$",
        read=_READ,
        loss=_ERROR,
        source="arXiv:2409.07146",
    )
    decay: ClassVar = "key"
    learned_gates: ClassVar = LearnedGates(
        decay=True, decay_of_step=lambda step: sigmoid_bias(_TEMPERATURE * step)
    )

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        return self.overwriting(tokens, given(tokens.log_decay))

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return jax.nn.log_sigmoid(given(inputs.decay)) / _TEMPERATURE, None


@dataclass(frozen=True, kw_only=True)
class Raven(AbstractSlotAttention):
    """Gated slot attention of which a router lets each token write the best slots only.

    `strength` holds the router's weights r, 0 for slots that keep all; they multiply the logarithm
    of the head's decay. Training without the published noise on the router's scores; the published
    layer norms queries and keys.

    References: github.com/goombalab/raven.
    """

    form: ClassVar[Form] = Form(
        name="Raven",
        right=r"$\mathrm{Diag}(\alpha_t^{r_t})$",
        written=r"$(k, v)(1-\alpha_t^{r_t})^\top$",
        read=_READ,
        loss=_ERROR.replace(r"\alpha_{t,i}", r"\alpha_t^{r_{t,i}}"),
        source="github.com/goombalab/raven",
    )
    decay: ClassVar = "head"
    strength: ClassVar = "key"
    learned_gates: ClassVar = SOFTPLUS_GATES

    routed: ShareAboveZero = 0.5
    """Share of the slots that a token may write; at least one slot is."""

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        return self.overwriting(tokens, given(tokens.strength) * given(tokens.log_decay)[..., None])

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        scores = jax.nn.sigmoid(given(inputs.strength))
        best = max(round(self.routed * scores.shape[-1]), 1)
        chosen, slots = jax.lax.top_k(scores, best)
        weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-9)
        routed = jnp.put_along_axis(jnp.zeros_like(scores), slots, weights, -1, inplace=False)
        return projected_decay(inputs), routed
