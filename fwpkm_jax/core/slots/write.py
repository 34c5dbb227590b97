"""The write of FwPKM: every formula, in the order in which the paper has them (section 3).

A chunk is written once, after it has been read. A token t has read y[t] from the slots i[t, p] with
weights w[t, p]; v[t] is what it should have read, m[t] its write weight, n[i] how often slot i was
read. Then, for the values (Eqs. 13 to 17):

    e[t]    = m[t] (y[t] - v[t])                              `ValueWrite.error`
    s[t, p] = -eta w[t, p] / max(n[i[t, p]], 1)               `ValueWrite.steps`
    V[i]   += sum of s[t, p] e[t] over the places that read slot i     `values.rows.add_rows`

with eta the `step_size`, of which the learning rate is a part. For the sub-keys (Eq. 18), with P
the softmax of each query's scores over the sub-keys it chose:

    p[j]    = mean of P[t, j] over tokens and heads           `sub_key_usage`
    L       = sum of p[j] log(p[j] + 1e-8)                    `usage_loss`
    k[j]   -= eta_k dL/dk[j]                                  `addressing_gradient`, `KeyWrite.step`

Reads have their formulas in `core.slots.keys.addressing` (Eqs. 5 to 7 and 20) and
`core.slots.values.table` (Eq. 11). Every executor takes the write from here, whatever way it holds
chunk and table, and its backward pass is `jax.vjp` of these functions. A kernel that computes the
error itself says so by naming `ValueWrite.error`, and refuses a write whose `ValueWrite.options`
are not empty.

References: Zhao and Jones 2026, arXiv:2601.00671.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import Queries, SubKeys, TokenWeights, ValueTable
from fwpkm_jax.core.chunks import ChunkSizeTag
from fwpkm_jax.core.slots.keys.addressing import Address, Score, SubKeyChoice, split_halves
from fwpkm_jax.core.slots.keys.sums import add_to_sub_keys, sub_key_totals

_LOG_EPSILON = 1e-8  # Inside the entropy's logarithm.
_LEAST_TOTAL = 1e-20  # Without any token the average is empty: zero access, not 0 / 0.


class SlotChunk(NamedTuple):
    """A `core.chunks.Chunk` with two fields for the slots.

    Attributes:
      query, target, write_weight, paired, counted, cut: see `core.chunks.Chunk`. Reads of tokens
        with `counted` = 1 count in a slot's number of accesses.
      addressed: `[tokens]`, weight of the token in the addressing loss's average.
      factor: `[tokens]`, multiplies the token's value step but not its loss, or None.
    """

    query: jax.Array
    target: jax.Array
    write_weight: jax.Array
    paired: jax.Array
    counted: jax.Array
    addressed: jax.Array
    factor: jax.Array | None = None
    cut: ChunkSizeTag | None = None

    @property
    def error_weight(self) -> jax.Array:
        """Weight of each token's error in the value step, `[tokens]`."""
        return self.write_weight if self.factor is None else self.factor * self.write_weight


class SlotAccess(NamedTuple):
    """Which slots each token read, heads joined, best first within a head."""

    slot_ids: Int[Array, "*tokens places"]
    slot_weights: Float[Array, "*tokens places"]


class SlotWriteWeights(NamedTuple):
    """`core.targets.WriteWeights` with the two further fields of a `SlotChunk`."""

    write: Float[Array, "batch length"]
    paired: Float[Array, "batch length"]
    counted: Float[Array, "batch length"]
    addressed: Float[Array, "batch length"]
    factor: Float[Array, "batch length"] | None = None


@dataclass(frozen=True, kw_only=True)
class ValueWrite:
    """A normalised gradient step of the values on the memory loss (Eqs. 13 to 17).

    A new option of the write is a field here, with a default that is off, and a field of the rule
    that sets it: kernels then refuse writes that use it, and plain XLA takes their place.

    Attributes:
      step_size: multiplies the mean error of a slot; heads * top_k makes one write move a typical
        prediction by about its whole error, since the mean read weight is the reciprocal.
      learning_rate: multiplies the step after clipping; 1 for a write that only adds to rows, whose
        `step_size` has it.
      clip: bound on each element of the gradient, or None. Needs the gradient of the whole table.
      weight_decay: adds this multiple of the table to the gradient; needs the whole table.
    """

    step_size: float
    learning_rate: float = 1.0
    clip: float | None = None
    weight_decay: float = 0.0

    def error(self, read: jax.Array, target: jax.Array, weight: jax.Array) -> jax.Array:
        """e: the derivative by what a token read of half its weighted squared error.

        Elementwise, so that devices and kernels may hold any columns of it.

        Args:
          read: y, `[..., value]`.
          target: v, `[..., value]`.
          weight: m, `[..., 1]` or a number.
        """
        return weight * (read - target)

    def steps(
        self, weights: Float[Array, "*n tokens places"], counts: Float[Array, "*n tokens places"]
    ) -> Float[Array, "*n tokens places"]:
        """s: the multiple of its token's error that each place adds to its slot.

        A slot so moves by `step_size` times the mean of its readers' weighted errors.

        Args:
          counts: n, how often the chunk reads each place's slot.
        """
        return -self.step_size * weights / jnp.maximum(counts, 1.0)

    def dense_step(self, values: ValueTable, gradient: ValueTable) -> ValueTable:
        """The table after a write whose gradient is known for all slots."""
        if self.clip is not None:
            gradient = jnp.clip(gradient, -self.clip, self.clip)
        return values - self.learning_rate * (gradient + self.weight_decay * values)

    @property
    def is_sparse(self) -> bool:
        """Whether only slots that were read move."""
        return self.clip is None and self.weight_decay == 0.0

    @property
    def options(self) -> str:
        """What sets this write apart from the plain one of any size, for messages; "" if nothing.

        A kernel that computes `error` or `steps` itself knows the plain write alone.
        """
        options = [field for field in dataclasses.fields(self) if field.name != "step_size"]
        values = {field.name: getattr(self, field.name) for field in options}
        return ", ".join(
            f"{field.name}={values[field.name]}"
            for field in options
            if values[field.name] != field.default
        )


PLAIN = ValueWrite(step_size=1.0)
"""The write whose error kernels compute."""


class SubKeyUsage(NamedTuple):
    """How much tokens use each sub-key; adds up over blocks of tokens.

    Attributes:
      access: each token's softmax over its best sub-keys, summed over tokens and heads.
      total: the weight that `access` is an average over, when divided by it.
    """

    access: Float[Array, "2 subkeys"]
    total: Float[Array, ""]


def sub_key_usage(
    address: Address | SubKeyChoice, *, num_subkeys: int, token_weights: TokenWeights
) -> SubKeyUsage:
    """The usage by the tokens of one address, each with its weight."""
    access = sub_key_totals(
        sub_key_access(address.sub_key_scores, token_weights), address.sub_key_ids, num_subkeys
    )
    return SubKeyUsage(access.sum(0), address.sub_key_ids.shape[1] * jnp.sum(token_weights))


def sub_key_access(
    scores: Float[Array, "tokens heads 2 top_k"], token_weights: TokenWeights
) -> Float[Array, "tokens heads 2 top_k"]:
    """Weighted access to each chosen sub-key: the softmax of its scores."""
    return _softmax(scores) * token_weights[:, None, None, None]


def _softmax(scores: Float[Array, "*queries top_k"]) -> Float[Array, "*queries top_k"]:
    """The softmax of scores of which the first is the best."""
    # Scores are sorted, so the first is the largest and no reduction looks for it.
    parts = jnp.exp(scores - jax.lax.stop_gradient(scores[..., :1]))
    return parts / _sum_of_places(parts)


def _sum_of_places(x: Float[Array, "*queries top_k"]) -> Float[Array, "*queries 1"]:
    """Sums one place after the other: a GPU computes this with what follows, and no reduction."""
    total = x[..., :1]
    for place in range(1, x.shape[-1]):
        total = total + x[..., place : place + 1]
    return total


def addressing_loss(
    address: Address | SubKeyChoice,
    *,
    num_subkeys: int,
    token_weights: TokenWeights,
) -> Float[Array, ""]:
    """Negative entropy of the average access to each codebook, summed over both (Eq. 18).

    Each query spreads one unit over its own best sub-keys by a softmax; the average over tokens and
    heads is flat when all sub-keys are used alike.

    Args:
      address: from `product_top_k`.
      token_weights: weight of each token in the average; 0 leaves a token out.
    """
    return usage_loss(sub_key_usage(address, num_subkeys=num_subkeys, token_weights=token_weights))


def usage_loss(usage: SubKeyUsage) -> Float[Array, ""]:
    """`addressing_loss` of tokens that use the sub-keys like this."""
    marginal = usage.access / jnp.maximum(usage.total, _LEAST_TOTAL)
    return jnp.sum(marginal * jnp.log(marginal + _LOG_EPSILON))


def usage_slopes(usage: SubKeyUsage) -> Float[Array, "2 subkeys"]:
    """Derivative of `addressing_loss` by the average access to each sub-key."""
    marginal = usage.access / jnp.maximum(usage.total, _LEAST_TOTAL)
    return jnp.log(marginal + _LOG_EPSILON) + marginal / (marginal + _LOG_EPSILON)


def of_chosen(
    of_sub_keys: Float[Array, "*heads 2 subkeys"], sub_key_ids: Int[Array, "tokens heads 2 top_k"]
) -> Float[Array, "tokens heads 2 top_k"]:
    """The number of each chosen sub-key; without an axis of heads, they share the numbers."""
    heads = [jnp.arange(size)[:, None, None] for size in of_sub_keys.shape[:-2]]
    return of_sub_keys[*heads, jnp.arange(2)[:, None], sub_key_ids]


def addressing_coefficients(
    scores: Float[Array, "tokens heads 2 top_k"],
    slopes: Float[Array, "tokens heads 2 top_k"],
    token_weights: TokenWeights,
    usage: SubKeyUsage,
    *,
    score: Score,
    probabilities: Float[Array, "tokens heads 2 top_k"] | None = None,
) -> Float[Array, "tokens heads 2 top_k"]:
    """How strongly a step on `addressing_loss` pulls each chosen sub-key to the token's query.

    With `slopes` from `usage_slopes`; the derivative by the score for `dot`, and for `idw` times
    the derivative of the score by the sub-key, over `query - sub-key`. `probabilities` is the
    softmax of the scores where it is known.
    """
    if probabilities is None:
        probabilities = _softmax(scores)
    # The softmax moves a share only against the mean of the others.
    centred = slopes - _sum_of_places(probabilities * slopes)
    weights = token_weights[:, None, None, None] / jnp.maximum(usage.total, _LEAST_TOTAL)
    coefficients = weights * probabilities * centred  # dL / dscore
    # d(-log(eps + r^2)) / dk = 2 (q - k) / (eps + r^2), and 1 / (eps + r^2) = exp(score).
    return 2.0 * coefficients * jnp.exp(scores) if score == "idw" else coefficients


def addressing_gradient(
    queries: Queries,
    keys: SubKeys,
    address: Address | SubKeyChoice,
    *,
    token_weights: TokenWeights,
    score: Score = "idw",
    usage: SubKeyUsage | None = None,
) -> SubKeys:
    """Gradient of `addressing_loss` with respect to the keys, written out.

    Only the chosen sub-keys' scores enter, so that the work beyond the address is one product of
    the queries with a sparse coefficient per sub-key. Differentiable once more, for training
    through the key update. Derived in docs/explanation/math.md.

    Args:
      queries: `[tokens, heads, key]`.
      keys: `[heads, 2, subkeys, key // 2]`.
      token_weights: as in `addressing_loss`.
      usage: of all tokens of the loss where these are one block of them; the blocks' results then
        add up to the gradient. None: the loss is of these tokens alone.
    """
    num_subkeys = keys.shape[2]
    if usage is None:
        usage = sub_key_usage(address, num_subkeys=num_subkeys, token_weights=token_weights)
    slopes = of_chosen(usage_slopes(usage), address.sub_key_ids)
    coefficients = addressing_coefficients(
        address.sub_key_scores, slopes, token_weights, usage, score=score
    )
    halves = split_halves(queries)
    gradient: Any = add_to_sub_keys(coefficients, address.sub_key_ids, halves, num_subkeys)
    if score == "dot":
        return gradient
    # sum c (q - k) = sum c q - (sum c) k: no difference is formed for each token.
    totals = sub_key_totals(coefficients, address.sub_key_ids, num_subkeys)
    return gradient - totals[..., None] * keys


@dataclass(frozen=True, kw_only=True)
class KeyWrite:
    """A gradient step of the sub-keys on the addressing loss.

    Attributes:
      learning_rate: multiplies the step.
      loss_weight: multiplies the addressing loss; 0 leaves it out.
      score: of the sub-keys.
      clip: bound on each element of the gradient, or None.
      weight_decay: adds this multiple of the keys to the gradient.
    """

    learning_rate: float
    loss_weight: float
    score: Score
    clip: float | None = None
    weight_decay: float = 0.0

    def gradient(
        self,
        keys: SubKeys,
        queries: Queries,
        address: Address | SubKeyChoice,
        *,
        token_weights: TokenWeights,
        usage: SubKeyUsage | None = None,
    ) -> SubKeys:
        """The gradient of a chunk, before clipping and decay.

        Args:
          keys: `[heads, 2, subkeys, key // 2]`.
          queries: of the chunk.
          address: of the queries.
          token_weights: which tokens are in the loss.
          usage: by all tokens of the write where the chunk is a part of them; the gradients of the
            parts then add up to that of the write.
        """
        if self.loss_weight == 0:
            return jnp.zeros_like(keys)
        # Its backward pass lays the coefficients out again, rather than keep them per chunk.
        spread = jax.checkpoint(functools.partial(addressing_gradient, score=self.score))
        gradient = spread(queries, keys, address, token_weights=token_weights, usage=usage)
        return self.loss_weight * gradient

    def step(self, keys: SubKeys, gradient: SubKeys) -> SubKeys:
        """The sub-keys after one write."""
        if self.clip is not None:
            gradient = jnp.clip(gradient, -self.clip, self.clip)
        if self.weight_decay:
            gradient = gradient + self.weight_decay * keys
        return keys - self.learning_rate * gradient
