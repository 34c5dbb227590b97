"""How a memory after some tokens depends on the memory before them, and composition of that.

For each kind of rule a small summary says it for any number of tokens: a device that holds a part
of a sequence computes the summary of its part without knowing the memory before it.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.core.recurrence.chunk_decay import HIGHEST
from fwpkm_jax.core.recurrence.linear_recurrence import chunk_recurrence, forgetting
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.prefix import parts_before


class Transition(Protocol):
    """The effect of some tokens on a memory; a pytree of arrays `[batch, heads, ...]`."""

    def then(self, later: Any) -> Any:
        """The effect of these tokens and the later ones together."""
        ...

    def after(self, state: Any) -> Any:
        """The memory after these tokens from the memory before them."""
        ...


class Fading(NamedTuple):
    """Each key channel keeps a share: `S -> exp(log_kept) S + end`.

    Attributes:
      log_kept: `[batch, heads, key]`, or 1 for all channels.
      end: the memory that the tokens make from an empty one, `[batch, heads, key, value]`.
    """

    log_kept: Float[Array, "batch heads rate"]
    end: Float[Array, "batch heads key value"]

    def then(self, later: "Fading") -> "Fading":
        return Fading(self.log_kept + later.log_kept, later.after(self.end))

    def after(self, state: jax.Array) -> jax.Array:
        return jnp.exp(self.log_kept)[..., None] * state + self.end


class Mixing(NamedTuple):
    """A matrix acts on the key channels: `S -> A S + end`.

    Attributes:
      matrix: A, `[batch, heads, key, key]`.
      end: as in `Fading`.
    """

    matrix: Float[Array, "batch heads key key"]
    end: Float[Array, "batch heads key value"]

    def then(self, later: "Mixing") -> "Mixing":
        matrix = jnp.einsum("bhij,bhjk->bhik", later.matrix, self.matrix, precision=HIGHEST)
        return Mixing(matrix, later.after(self.end))

    def after(self, state: jax.Array) -> jax.Array:
        mixed = jnp.einsum("bhij,bhjv->bhiv", self.matrix, state, precision=HIGHEST)
        return mixed + self.end


class MixingValues(NamedTuple):
    """A matrix acts on the value channels: `S -> S A + end`.

    Attributes:
      matrix: A, `[batch, heads, value, value]`.
      end: as in `Fading`.
    """

    matrix: Float[Array, "batch heads value value"]
    end: Float[Array, "batch heads key value"]

    def then(self, later: "MixingValues") -> "MixingValues":
        matrix = jnp.einsum("bhij,bhjk->bhik", self.matrix, later.matrix, precision=HIGHEST)
        return MixingValues(matrix, later.after(self.end))

    def after(self, state: jax.Array) -> jax.Array:
        mixed = jnp.einsum("bhki,bhij->bhkj", state, self.matrix, precision=HIGHEST)
        return mixed + self.end


def log_kept(
    log_decay: Float[Array, "batch length heads"] | Float[Array, "batch length heads key"] | None,
    starts: Bool[Array, "batch length"] | None,
    *,
    like: Float[Array, "batch length heads key"],
) -> Float[Array, "batch heads rate"]:
    """The log of what the tokens together keep, by the decays of `chunk_recurrence`.

    Args:
      log_decay: of each token; None: everything is kept.
      starts: tokens that find the memory empty; None: none.
      like: keys, for heads and dtype.
    """
    if starts is not None:
        log_decay = forgetting(log_decay, starts, dtype=like.dtype)
    if log_decay is None:
        return jnp.zeros((like.shape[0], like.shape[2], 1), like.dtype)
    # Shares multiply, so their logarithms add up.
    total = jnp.sum(log_decay, axis=1)
    total = total if total.ndim == 3 else total[..., None]
    return jnp.broadcast_to(total, (total.shape[0], like.shape[2], total.shape[2]))


def delta_transition(
    key: Float[Array, "batch writes heads key"],
    value: Float[Array, "batch writes heads value"],
    *,
    log_decay: Array | None,
    beta: Float[Array, "batch writes heads"] | None,
    starts: Bool[Array, "batch length"] | None = None,
    chunk_size: int = 64,
) -> Mixing:
    """What tokens do to a memory by the delta rule; arguments as of `chunk_recurrence`.

    One pass over the tokens: the memory starts as `[identity, empty]` side by side, and the tokens
    write `[0, value]`.
    """
    dtype = compute_dtype(key.dtype, value.dtype)
    batch, _, heads, width = key.shape
    # A linear map is known by what it makes of the identity.
    start, value = beside_identity(value.astype(dtype), width)
    length = key.shape[1] if log_decay is None else log_decay.shape[1]
    end = chunk_recurrence(
        jnp.zeros((batch, length, heads, width), dtype),
        key.astype(dtype),
        value,
        log_decay=log_decay,
        beta=beta,
        initial_state=start,
        starts=starts,
        chunk_size=chunk_size,
    ).final_state
    return Mixing(end[..., :width], end[..., width:])


def beside_identity(
    value: Float[Array, "batch writes heads value"], width: int
) -> tuple[Float[Array, "batch heads key both"], Float[Array, "batch writes heads both"]]:
    """The memory `[identity, empty]`, and `[0, value]` to write in it, for keys of that width.

    Afterwards the memory is `[A, end]` of `Mixing`.
    """
    batch, _, heads, values = value.shape
    start = jnp.eye(width, width + values, dtype=value.dtype)
    start = jnp.broadcast_to(start, (batch, heads, *start.shape))
    return start, jnp.pad(value, [(0, 0)] * 3 + [(width, 0)])


def before_part(transition: Any, state: Any, *, axis: SequenceAxis) -> Any:
    """The memory before this device's part, from all parts' transitions.

    A device sends `ceil(log2(devices - 1)) + 1` transitions, whatever the length of its part.

    Args:
      transition: of this device's part, a `Transition`.
      state: memory before the whole sequence, equal on all devices.
    """
    earlier = parts_before(transition, lambda one, other: one.then(other), axis=axis)
    # The first device has no part before it: its memory is the given one.
    found = earlier.after(state)
    return jax.tree.map(lambda new, old: jnp.where(axis.index > 0, new, old), found, state)
