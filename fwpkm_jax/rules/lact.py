"""LaCT: a fast SwiGLU with step sizes from the data, whose rows keep their norms."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import StepOutput, cast
from fwpkm_jax.core.newton_schulz import frobenius_norm, newton_schulz
from fwpkm_jax.rules.base import check_memory, check_query
from fwpkm_jax.rules.gradient import AbstractGradientRule, GradientChunk

_NORM_EPSILON = 1e-5
_MUON_EPSILON = 1e-7
# One row per iteration. Jordan et al. 2024 (Muon).
_NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class SwiGLUWeights(NamedTuple):
    """`down (SiLU(gate x) * (up x))`; the order is that of a token's rates."""

    gate: Float[Array, "hidden key"]
    down: Float[Array, "value hidden"]
    up: Float[Array, "hidden key"]


class LaCTMemory(NamedTuple):
    """Fast weights of one sequence and head.

    Attributes:
      weights: in use.
      accumulated: the weights to which steps are added: equal to `weights`, or with `pre_norm` the
        sum of all steps without normalisation.
      momentum: the last step before orthogonalisation.
      row_norms: norm of each row at the start, which `weights` keep.
    """

    weights: SwiGLUWeights
    accumulated: SwiGLUWeights
    momentum: SwiGLUWeights
    row_norms: tuple[Float[Array, " hidden"], Float[Array, " value"], Float[Array, " hidden"]]


class LaCTInfo(NamedTuple):
    """Measures of one write: Euclidean norm of the change of the weights in use."""

    update_norm: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class LaCTRule(AbstractGradientRule):
    """A SwiGLU that takes one step per chunk on the inner product of its reads with the values.

    The loss is `- sum over tokens of rate * <f(key), value>` with a rate per token and tensor
    (`GradientChunk.rates`); its `momentum`, averaged over the chunk, keeps a share of the last
    step. After each step every row is scaled to its initial norm. The rule has one head. Weights
    are in float32; products take the device's default precision, as the published layer's do.

    References: Zhang et al. 2025, arXiv:2505.23884.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax import LaCTRule
      >>> rule = LaCTRule(key_dim=4, value_dim=4, hidden_dim=4)
      >>> memory = rule.init(jax.random.key(0))
      >>> rule.read(memory, jnp.ones((8, 1, 4))).shape
      (8, 4)
    """

    key_dim: int = 192
    """Width of keys and queries."""
    value_dim: int = 192
    """Width of values."""
    hidden_dim: int = 192
    """Width of the hidden layer."""
    learning_rate: float = 1e-3
    """Step size of tokens without `GradientChunk.rates`."""
    momentum: float = 0.0
    """Share of the last step kept in chunks without `GradientChunk.momentum`."""
    pre_norm: bool = False
    """Sums the steps without normalisation; reads use the sum with its rows at initial norms."""
    muon: bool = False
    """Orthogonalises each step by five Newton-Schulz iterations, after the momentum is updated."""

    num_rates: ClassVar[int] = 3
    """Of a token: of the gate, the down and the up matrix."""

    @classmethod
    def tiny(cls) -> "LaCTRule":
        return cls(key_dim=3, value_dim=4, hidden_dim=5, learning_rate=0.3, momentum=0.5)

    def init(self, rng: jax.Array) -> LaCTMemory:
        """Normal with variance 1 / fan-in."""
        check_key(rng)

        def normal(rng: jax.Array, outputs: int, inputs: int) -> jax.Array:
            return inputs**-0.5 * jax.random.normal(rng, (outputs, inputs), jnp.float32)

        gate, down, up = jax.random.split(rng, 3)
        return self.start(
            SwiGLUWeights(
                normal(gate, self.hidden_dim, self.key_dim),
                normal(down, self.value_dim, self.hidden_dim),
                normal(up, self.hidden_dim, self.key_dim),
            )
        )

    def start(self, weights: SwiGLUWeights) -> LaCTMemory:
        """The memory of a sequence that begins with these weights."""
        # The norms of the start stay with the memory: every write returns its rows to them.
        norms = (_row_norms(weights.gate), _row_norms(weights.down), _row_norms(weights.up))
        return LaCTMemory(weights, weights, jax.tree.map(jnp.zeros_like, weights), norms)

    def read(self, memory: LaCTMemory, query: Queries) -> TokenValues:
        """Reads `[tokens, 1, key]`."""
        check_memory(self, memory)
        check_query(self, query)
        gate, down, up = memory.weights
        x = query[:, 0].astype(gate.dtype)
        return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def step(self, memory: LaCTMemory, chunk: GradientChunk) -> StepOutput:
        chunk = cast(chunk, memory.weights.gate.dtype)
        output = self.read(memory, chunk.query)
        change = jax.tree.map(
            lambda new, last: new + _mean_momentum(chunk, self.momentum) * last,
            self.descent(memory, chunk),
            memory.momentum,
        )
        step = jax.tree.map(_orthogonalize, change) if self.muon else change
        # The norms are set on what is read; with `pre_norm` the sum itself grows freely.
        total = jax.tree.map(jnp.add, memory.accumulated, step)
        weights = SwiGLUWeights(*map(_with_row_norms, total, memory.row_norms))
        after = LaCTMemory(weights, total if self.pre_norm else weights, change, memory.row_norms)
        # Padding must not change the memory, but rounding in the norms would change it slightly.
        written = jnp.any(chunk.write_weight != 0)
        after = jax.tree.map(lambda new, old: jnp.where(written, new, old), after, memory)
        difference = jax.tree.map(jnp.subtract, after.weights, memory.weights)
        squares = sum(jnp.sum(leaf**2) for leaf in difference)
        info = LaCTInfo(jnp.sqrt(jax.lax.stop_gradient(squares)))
        return StepOutput(after, output, None, info)

    def descent(self, memory: LaCTMemory, chunk: GradientChunk) -> SwiGLUWeights:
        """The negative gradient of the loss, each tensor with its own rates."""
        gate, down, up = memory.weights
        keys = (chunk.query if chunk.key is None else chunk.key)[:, 0]
        rates = chunk.rates
        if rates is None:
            rates = jnp.full((keys.shape[0], 3), self.learning_rate, keys.dtype)
        # A token that must not write has a rate of 0.
        rates = rates * chunk.write_weight[:, None]
        gate_rate, down_rate, up_rate = (rates[:, i : i + 1] for i in range(3))
        before, upper = keys @ gate.T, keys @ up.T
        slope = jax.nn.sigmoid(before)
        silu = before * slope
        slope = slope * (1 + before - silu)  # The derivative of SiLU.
        # The loss is an inner product, so the values themselves are what flows back.
        back = chunk.target @ down
        return SwiGLUWeights(
            gate=(gate_rate * back * upper * slope).T @ keys,
            down=chunk.target.T @ (down_rate * silu * upper),
            up=(up_rate * back * silu).T @ keys,
        )


def _mean_momentum(chunk: GradientChunk, otherwise: float) -> Float[Array, ""] | float:
    if chunk.momentum is None:
        return otherwise
    total = jnp.sum(chunk.counted * chunk.momentum)
    return total / jnp.maximum(jnp.sum(chunk.counted), 1.0)


def _row_norms(x: Float[Array, "rows columns"]) -> Float[Array, " rows"]:
    return jnp.sqrt(jnp.sum(x**2, axis=1))


def _with_row_norms(
    x: Float[Array, "rows columns"], norms: Float[Array, " rows"]
) -> Float[Array, "rows columns"]:
    return x * (norms / (_row_norms(x) + _NORM_EPSILON))[:, None]


def _orthogonalize(x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Approximately the nearest matrix with all singular values 1; zero for a zero matrix."""
    return newton_schulz(x / (frobenius_norm(x) + _MUON_EPSILON), _NEWTON_SCHULZ)
