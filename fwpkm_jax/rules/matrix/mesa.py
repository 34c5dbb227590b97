"""Mesa: reads with the least-squares solution of everything written so far."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fwpkm_jax.core.recurrence.decay_starts import sigmoid_bias
from fwpkm_jax.core.recurrence.linear_recurrence import RecurrenceOutput
from fwpkm_jax.literals import Bound, Count
from fwpkm_jax.rules.matrix.base import Form, GateInputs, LearnedGates, Starts, State, Tokens, given
from fwpkm_jax.rules.matrix.features import FeatureMap
from fwpkm_jax.rules.matrix.recurrence import AbstractRecurrenceRule


@dataclass(frozen=True, kw_only=True)
class Mesa(AbstractRecurrenceRule):
    """Keeps the decayed sums G of β v k^T and H of β k k^T, and reads `G (H + ridge I)^-1 q`.

    That is the map with the least decayed square error on all pairs so far. `cg_steps` steps of
    conjugate gradients solve the system; in chunks each is one pass of the shared algorithm with
    the keys as values. Gradients go through the steps. The published layer learns the ridge for
    each channel, and takes up to 30 steps.

    The state is `[key, value + key]`: G's transpose, then H.

    References: von Oswald et al. 2025, arXiv:2506.05233.
    """

    form: ClassVar[Form] = Form(
        name="Mesa",
        right=r"$\alpha_t I$",
        written=r"$\beta_t vk^\top$",
        read=r"$W(H + \Lambda)^{-1}q$, $H$ as $W$ with $v = k$",
        loss=r"$-\beta_t v^\top Wk + \tfrac{1-\alpha_t}{2}\lVert W\rVert^2$, of $H$ alike",
        source="arXiv:2506.05233",
    )
    decay: ClassVar = "head"
    strength: ClassVar = True
    transition: ClassVar = "fades"
    learned_gates: ClassVar = LearnedGates(
        decay=True, strength=True, decay_bias=4.0, decay_of_step=sigmoid_bias
    )

    feature_map: FeatureMap = "l2"
    convolution: bool = True
    cg_steps: Count = 8
    """Steps of conjugate gradients per read; as many as the key's width solve exactly."""
    ridge: Annotated[float, Bound(1e-06)] = 1.0
    """Added to the diagonal of H, at least 1e-6. At first the memory is empty, and the ridge alone
    is solved for."""

    @classmethod
    def variants(cls) -> "tuple[Mesa, ...]":
        return (cls(cg_steps=2),)

    def init(self, batch: int, heads: int, key: int, value: int, *, dtype: DTypeLike) -> State:
        # G, keys to values, and H, keys to keys, side by side: one recurrence moves both.
        return jnp.zeros((batch, heads, key, value + key), dtype)

    def read(self, state: State, token: Tokens):
        width = token.key.shape[-1]
        covariance = _symmetric(state[:, -width:])
        solved = self._solve(lambda x: x @ covariance, token.query)
        return solved @ state[:, :-width]

    def recurrence_inputs(self, tokens: Tokens) -> Tokens:
        # The value and the key, both times the strength.
        both = jnp.concatenate([tokens.value, tokens.key], axis=-1)
        return tokens._replace(value=given(tokens.strength)[..., None] * both)

    def chunked(self, tokens: Tokens, state: State, starts: Starts = None) -> RecurrenceOutput:
        width = tokens.key.shape[-1]
        written = self.recurrence_inputs(tokens).value

        def read(query: Array, value: Array, start: Array) -> RecurrenceOutput:
            return self.recurrence(tokens._replace(query=query, value=value), start, starts)

        # H alone is read while the system is solved; G only with the solution.
        start = _symmetric(state[..., -width:])
        # Each product H x for all tokens at once is a read of H with x as the query.
        solved = self._solve(lambda x: read(x, written[..., -width:], start).output, tokens.query)
        out = read(solved, written, state)
        return out._replace(output=out.output[..., :-width])

    def gates(self, inputs: GateInputs) -> tuple[Array | None, Array | None]:
        return jax.nn.log_sigmoid(given(inputs.decay)), jax.nn.sigmoid(given(inputs.strength))

    def _solve(
        self, product: Callable[[Array], Array], right: Float[Array, "*dims key"]
    ) -> Float[Array, "*dims key"]:
        """The solution x of `product(x) + ridge x = right`, by conjugate gradients from 0."""
        # x is as long as `right`; of short ones, squares would leave the range of numbers.
        longest = jax.lax.stop_gradient(jnp.max(jnp.abs(right), axis=-1, keepdims=True))
        longest = jnp.where(longest > jnp.finfo(right.dtype).tiny, longest, 1)
        right = right / longest
        # A residual that is rounding only has no direction.
        negligible = jnp.square(jnp.finfo(right.dtype).eps) * _dot(right, right)

        def step(carry, _):
            x, residual, direction, size = carry
            image = product(direction) + self.ridge * direction
            # A solved system takes steps of 0; other tokens of the batch go on.
            going = size > negligible
            length = jnp.where(going, size / jnp.where(going, _dot(direction, image), 1), 0)
            x = x + length * direction
            residual = residual - length * image
            after = _dot(residual, residual)
            turn = jnp.where(going, after / jnp.where(going, size, 1), 0)
            return (x, residual, residual + turn * direction, after), None

        start = (jnp.zeros_like(right), right, right, _dot(right, right))
        return longest * jax.lax.scan(step, start, length=self.cg_steps)[0][0]


def _dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=-1, keepdims=True)


def _symmetric(x: Array) -> Array:
    """H is symmetric; so is what rounding, or a state of other origin, makes of it."""
    return (x + x.swapaxes(-1, -2)) / 2
