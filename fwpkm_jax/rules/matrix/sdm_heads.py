"""Sparse Delta Memory with a table of slots for each sequence and head, as its paper has it."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.core.slots.delta.addressing import best_slots
from fwpkm_jax.core.slots.delta.chunks import sparse_delta
from fwpkm_jax.core.slots.delta.definition import Decay, DeltaTokens, FirstTable
from fwpkm_jax.core.slots.delta.documents import sparse_delta_in_documents
from fwpkm_jax.literals import Count
from fwpkm_jax.rules.matrix.base import (
    AbstractMatrixRule,
    Form,
    GateInputs,
    LocalLoss,
    Starts,
    State,
    Tokens,
    forgotten,
    given,
)
from fwpkm_jax.rules.matrix.deltanet import sigmoid_strength
from fwpkm_jax.rules.matrix.gated_deltanet import SOFTPLUS_GATES, projected_decay
from fwpkm_jax.rules.matrix.recurrence import delta_step, error_loss
from pallas_kernels.row_ops import chosen_sums

_MOST = 128  # Slots that a token writes or reads where the rule does not say.


@dataclass(frozen=True, kw_only=True)
class SDMHeads(AbstractMatrixRule):
    """The gated delta rule on a table of slots, of which each token writes and reads a few.

    The first half of a key or query has the scores of rows, the second those of columns. Of all
    `(key / 2)**2` slots the best are chosen, with the softmax of their scores as weights: k of a
    key, q of a query. The written slots decay; then their weighted sum moves towards the value by
    the share `strength` (β). `rules.sdm.SDM` is the same for a memory layer.

    References: Cabannes et al. 2026, arXiv:2607.07386, section 3.1.
    """

    form: ClassVar[Form] = Form(
        name="Sparse Delta Memory",
        right=r"$\mathrm{Diag}(\alpha_t^{[k \ne 0]})(I - \beta_t kk^\top)$",
        written=r"$\beta_t vk^\top$",
        loss=r"$\tfrac12\lVert W\,\mathrm{Diag}(\sqrt{1-\alpha_t^{[k \ne 0]}})\rVert^2$, "
        r"then $\tfrac12\lVert v - Wk\rVert^2$",
        step_size=r"$1$, then $\beta_t$",
        source="arXiv:2607.07386",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    learned_gates: ClassVar = SOFTPLUS_GATES
    transition: ClassVar = "other"
    sparse: ClassVar = True

    convolution: bool = True
    num_writes: Count | None = None
    """Slots that a token writes; None: as many as there are rows, at most 128."""
    num_reads: Count | None = None
    """Slots that a token reads; None: as many as there are rows, at most 128."""
    slot_decay: Decay = "slot"
    """How much a token's decay acts on the slots that it writes: on all alike, or to the power of
    their write weights ("weighted")."""
    first_table: FirstTable = "zeros"
    """What sequences and documents start from: zeros, or a table for each head that a layer learns
    with its other weights."""

    @classmethod
    def variants(cls) -> "tuple[SDMHeads, ...]":
        return cls(), cls(slot_decay="weighted", first_table="learned")

    @property
    def learned_start(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.first_table == "learned"

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        if key % 2:
            raise ValueError(f"key_head_dim={key} must be even: scores of rows and of columns.")
        for name in ("num_writes", "num_reads"):
            number = getattr(self, name)
            if number is not None and number > key // 2:
                raise ValueError(
                    f"{name}={number} exceeds the {key // 2} rows of key_head_dim={key}; lower it, "
                    "or double key_head_dim."
                )
        return jnp.zeros((batch, heads, (key // 2) ** 2, value), dtype)

    def features(self, query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        # Scores, which the softmax takes as they are.
        query, key, value = (x.astype(compute_dtype(x.dtype)) for x in (query, key, value))
        return query, key, value

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return projected_decay(inputs), sigmoid_strength(inputs, negative_eigenvalues=False)

    def write(self, state: State, token: Tokens) -> State:
        key, log_decay = self._key(token, state)
        state = jnp.exp(log_decay)[:, None] * state
        return delta_step(state, key, token.value, given(token.strength))

    def read(self, state: State, token: Tokens) -> Float[Array, " value"]:
        return _spread(*_slots(token.query, self.num_reads), state.shape[0])[0] @ state

    def losses(self, state: State, token: Tokens) -> tuple[LocalLoss, ...]:
        key, log_decay = self._key(token, state)

        def decay(matrix):
            return jnp.sum(forgotten(log_decay)[:, None] * jnp.square(matrix)) / 2

        return LocalLoss(decay), error_loss(key, token.value, given(token.strength))

    def _key(self, token: Tokens, state: State) -> tuple[Array, Array]:
        """The write weight of every slot, and its log decay, 0 where nothing is written."""
        key, written = _spread(*_slots(token.key, self.num_writes), state.shape[0])
        share = key if self.slot_decay == "weighted" else written
        return key, given(token.log_decay) * share

    def chunked(
        self, tokens: Tokens, state: State, starts: Starts = None, fresh: State | None = None
    ) -> RecurrenceOutput:
        write_ids, write_weights = _slots(tokens.key, self.num_writes)
        read_ids, read_weights = _slots(tokens.query, self.num_reads)
        chosen = DeltaTokens(
            *(write_ids, write_weights, read_ids, read_weights, tokens.value),
            log_decay=given(tokens.log_decay),
            strength=given(tokens.strength),
        )
        batch, heads = state.shape[:2]
        # Every sequence and head has a table of its own.
        by_head = jax.tree.map(
            lambda x: x.swapaxes(1, 2).reshape(batch * heads, -1, *x.shape[3:]), chosen
        )
        tables = state.reshape(batch * heads, *state.shape[2:])
        how: dict[str, Any] = {"decay": self.slot_decay, "chunk_size": self.chunk_size}
        how["sums"] = chosen_sums(state)
        if starts is None:
            out = sparse_delta(tables, by_head, **how)
        else:
            starts = jnp.repeat(starts, heads, axis=0)
            first = jnp.broadcast_to(0.0 if fresh is None else fresh, state.shape)
            first = first.astype(state.dtype).reshape(tables.shape)
            out = sparse_delta_in_documents(tables, by_head, starts, fresh=first, **how)
        output = out.output.reshape(batch, heads, *out.output.shape[1:]).swapaxes(1, 2)
        return RecurrenceOutput(output, out.table.reshape(state.shape))


def _slots(scores: Float[Array, "*tokens key"], number: int | None) -> tuple[Array, Array]:
    """Slots and weights `[..., number]` of a token's scores of rows and columns."""
    rows = scores.shape[-1] // 2
    number = min(rows, _MOST) if number is None else number
    ids, best = best_slots(scores.reshape(-1, 1, 2, rows), number)
    shape = (*scores.shape[:-1], number)
    return ids.reshape(shape), jax.nn.softmax(best, axis=-1).reshape(shape)


def _spread(ids: Array, weights: Array, num_slots: int) -> tuple[Array, Array]:
    """A token's weights as a vector over all slots, and 1 where it has a slot."""
    zeros = jnp.zeros((num_slots,), weights.dtype)
    return zeros.at[ids].add(weights), zeros.at[ids].set(1.0)
