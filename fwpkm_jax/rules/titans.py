"""Titans: a small network that learns keys and values by gradients with momentum and forgetting."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import TokenValues
from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import RunOutput, StepOutput, cast, scan_chunks
from fwpkm_jax.core.newton_schulz import frobenius_norm, newton_schulz
from fwpkm_jax.core.numerics import layer_normalize
from fwpkm_jax.literals import Bound, Checked, Count, Natural, Positive
from fwpkm_jax.rules.base import check_run
from fwpkm_jax.rules.gradient import AbstractGradientRule, GradientChunk

_MUON_EPSILON = 1e-7
_NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024 (Muon).


class TitansNetwork(NamedTuple):
    """Weights of the memory, or one value per weight; leaves may have leading axes.

    Attributes:
      scale: of the output's norm, minus 1; None without that norm.
      layers: matrices `[in, out]`.
      biases: added behind the matrices, `[out]`; None for a network without.
      norm_bias: added behind the output's norm; None for a network without.
    """

    scale: Float[Array, "*n value"] | None
    layers: tuple[Float[Array, "*n _ _"], ...]
    biases: tuple[Float[Array, "*n _"], ...] | None = None
    norm_bias: Float[Array, "*n value"] | None = None


class TitansMemory(NamedTuple):
    """Fast weights of one sequence and head.

    Attributes:
      weights: in use.
      momentum: the surprise carried on, leaves `[orders, ...]`.
    """

    weights: TitansNetwork
    momentum: TitansNetwork


class TitansWrites(NamedTuple):
    """The inputs of `n` writes of `w` tokens each.

    Attributes:
      key: `[n, w, key]`.
      value: `[n, w, value]`.
      rate: `[n, w]`, weight of each token's loss; a token with 0 is not written.
      momentum: `[n, orders]`, share of the last surprise kept, order by order.
      forget: `[n]`, share of the weights that is forgotten.
      combine: `[n, orders]`, shares of the orders in the step; None: the highest alone.
      tensor_scale: `[n, tensors]`, multiplies each tensor's gradient; None: 1.
      real: `[n]`, 0 for a write that must change neither weights nor momentum.
    """

    key: Float[Array, "n w key"]
    value: Float[Array, "n w value"]
    rate: Float[Array, "n w"]
    momentum: Float[Array, "n orders"]
    forget: Float[Array, " n"]
    real: Float[Array, " n"]
    combine: Float[Array, "n orders"] | None = None
    tensor_scale: Float[Array, "n tensors"] | None = None


class TitansInfo(NamedTuple):
    """Measures of one chunk: mean loss of its tokens at the weights where gradients are taken."""

    memory_loss: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class TitansShape(Checked):
    """The network of a Titans memory and how it is written: what a rule and its layer share."""

    depth: Annotated[int, Bound(1, 4)] = 2
    """Matrices of the network, 1 to 4, GELU between them; 1 is a matrix memory."""
    residual_norm: bool = True
    """Norms the network's output and adds its input."""
    write_size: Count = 1
    """Tokens whose gradients are summed into one step; they share momentum and forgetting."""
    momentum_order: Natural = 1
    """How many momenta follow each other; 2 is a momentum of the momentum, 0 is none."""
    max_gradient_norm: Positive | None = None
    """Bounds the norm of each tensor's gradient, smoothly."""
    bias: bool = False
    """Adds a bias behind each matrix."""
    write_norm: bool = True
    """Writes the norm's scale too; off: every write leaves it as it is."""
    orthogonalize: bool = False
    """Makes each matrix's step nearly orthogonal by Newton-Schulz iterations."""
    average_steps: bool = False
    """After the i-th write of a chunk the weights are those before the chunk plus the mean of its i
    steps, as TTT has it; off: plus their sum. A rule then needs `momentum_order=0` and `forget=0`;
    a layer needs a `chunk_size`, and adds a learned number to each mean's factor 1 / i."""
    norm_bias: bool = False
    """Adds a bias behind the output's norm."""
    gelu: Literal["exact", "tanh"] = "exact"
    """Form of the GELU between the matrices."""


@dataclass(frozen=True, kw_only=True)
class TitansRule(TitansShape, AbstractGradientRule):
    """A network M that takes a step on `||M(key) - value||^2` for each token or few tokens.

        S <- momentum S - rate * gradient,    M <- (1 - forget) M + S

    All gradients of a chunk are taken at the weights from before the chunk. Its steps are therefore
    two linear recurrences, which are solved in parallel. With chunks of one write this is the rule
    as published, token by token. A token is read after the write that it completes. Tokens behind
    a chunk's last complete write are read but not written. The rule has one head.

    TTT-Linear and TTT-MLP (arXiv:2407.04620) are the cases of one and two matrices with biases and
    a residual norm (with a bias, eps 1e-6) that is not written, no momentum and nothing forgotten,
    `average_steps`, the tanh form of GELU, and chunks of 16 tokens.

    References: Behrouz et al. 2025, arXiv:2501.00663, Eqs. 8 to 18; Sun et al. 2024,
    arXiv:2407.04620, and its published code.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fwpkm_jax import TitansRule
      >>> rule = TitansRule(key_dim=4, value_dim=4, hidden_dim=4)
      >>> memory = rule.init(jax.random.key(0))
      >>> rule.apply(memory.weights, jnp.ones((8, 4))).shape
      (8, 4)
    """

    key_dim: Count = 64
    """Width of keys and queries."""
    value_dim: Count = 64
    """Width of values."""
    hidden_dim: Count = 256
    """Width between the matrices."""
    loss: Literal["sum", "mean"] = "sum"
    """How the squared error is reduced over the features."""
    learning_rate: float = 0.1
    """Step size of tokens without `GradientChunk.rates`."""
    momentum: float = 0.5
    """Share of the last surprise kept by tokens without `GradientChunk.momentum`."""
    forget: float = 0.01
    """Share of the weights forgotten at each write."""
    norm_eps: Positive = 1e-5
    """Added to the variance in the output's norm."""
    init_std: Positive | None = None
    """Standard deviation of the first matrices, normal; None: Xavier-uniform."""

    def __post_init__(self):
        super().__post_init__()
        if self.residual_norm and self.key_dim != self.value_dim:
            raise ValueError(
                f"residual_norm=True adds keys of width {self.key_dim} to values of width "
                f"{self.value_dim}; make them equal or turn it off."
            )
        if self.norm_bias and not self.residual_norm:
            raise ValueError("norm_bias=True needs residual_norm=True, the norm that it follows.")
        if self.average_steps and (self.momentum_order or self.forget):
            raise ValueError(
                "average_steps=True averages plain steps; set momentum_order=0 and forget=0, not "
                f"{self.momentum_order} and {self.forget}."
            )

    @classmethod
    def tiny(cls) -> "TitansRule":
        return cls(key_dim=4, value_dim=4, hidden_dim=5, momentum_order=2)

    def init(self, rng: jax.Array) -> TitansMemory:
        """Matrices as `init_std` says, biases of 0, no momentum."""
        check_key(rng)
        widths = (self.key_dim, *[self.hidden_dim] * (self.depth - 1), self.value_dim)
        init = jax.nn.initializers.xavier_uniform()
        if self.init_std is not None:
            init = jax.nn.initializers.normal(self.init_std)
        rngs = jax.random.split(rng, self.depth)
        layers = [
            init(rng, shape, jnp.float32)
            for rng, shape in zip(rngs, itertools.pairwise(widths), strict=True)
        ]
        scale = jnp.zeros((self.value_dim,), jnp.float32) if self.residual_norm else None
        biases = tuple(jnp.zeros(x.shape[1:], jnp.float32) for x in layers) if self.bias else None
        norm_bias = jnp.zeros((self.value_dim,), jnp.float32) if self.norm_bias else None
        return self.start(TitansNetwork(scale, tuple(layers), biases, norm_bias))

    def start(self, weights: TitansNetwork) -> TitansMemory:
        """The memory of a sequence that begins with these weights."""
        orders = self.momentum_order
        momentum = jax.tree.map(lambda x: jnp.zeros((orders, *x.shape), x.dtype), weights)
        return TitansMemory(weights, momentum)

    def apply(
        self, network: TitansNetwork, x: Float[Array, "tokens key"]
    ) -> Float[Array, "tokens value"]:
        """M(x)."""
        y = x
        for index, matrix in enumerate(network.layers):
            y = (jax.nn.gelu(y, approximate=self.gelu == "tanh") if index else y) @ matrix
            if network.biases is not None:
                y = y + network.biases[index][None]
        if network.scale is None:
            return y
        y = layer_normalize(y, eps=self.norm_eps) * (1.0 + network.scale[None])
        return x + (y if network.norm_bias is None else y + network.norm_bias[None])

    def step(self, memory: TitansMemory, chunk: GradientChunk) -> StepOutput:
        chunk = cast(chunk, memory.weights.layers[0].dtype)
        writes = self._writes(chunk)
        after, momentum, losses = self.write(memory.weights, memory, writes)
        if self.average_steps:
            taken = jnp.concatenate([jnp.ones((1,), writes.real.dtype), jnp.cumsum(writes.real)])
            after = scale_steps(memory.weights, after, 1.0 / jnp.maximum(taken, 1.0))
        output = self.read(after, chunk.query[:, 0])
        last = jax.tree.map(lambda x: x[-1], after)
        # Tokens behind the last complete write have no loss.
        real = chunk.counted[: losses.size]
        loss = jnp.sum(real * losses.ravel()) / jnp.maximum(jnp.sum(real), 1.0)
        info = TitansInfo(jax.lax.stop_gradient(loss))
        return StepOutput(TitansMemory(last, momentum), output, None, info)

    def run(self, memory: TitansMemory, sequence: GradientChunk, *, chunk_size: int) -> RunOutput:
        """`step` over the chunks; the backward pass recomputes each chunk.

        Otherwise it would keep a copy of the weights for every write.
        """
        check_run(self, memory, sequence)
        return scan_chunks(jax.checkpoint(self.step), memory, sequence, chunk_size=chunk_size)

    def write(
        self, base: TitansNetwork, memory: TitansMemory, writes: TitansWrites
    ) -> tuple[TitansNetwork, TitansNetwork, Float[Array, "n w"]]:
        """The weights before the first and after each write, leaves `[n + 1, ...]`.

        Steps are added, also under `average_steps`; `scale_steps` makes their means.

        Args:
          base: weights that the gradients are taken at.
          memory: before the first write.
          writes: in order.

        Returns:
          The weights; the momentum after the last write; each token's loss at `base`.
        """
        if not writes.rate.shape[0]:
            unwritten = jax.tree.map(lambda x: x[None], memory.weights)
            return unwritten, memory.momentum, jnp.zeros_like(writes.rate)
        # All gradients are those at the weights before the chunk, so they are computed at once.
        gradients, losses = jax.vmap(jax.grad(self._loss, has_aux=True), in_axes=(None, 0, 0, 0))(
            base, writes.key, writes.value, writes.rate
        )
        if not self.write_norm and gradients.scale is not None:
            gradients = gradients._replace(scale=jnp.zeros_like(gradients.scale))
            if gradients.norm_bias is not None:
                norm_bias = jnp.zeros_like(gradients.norm_bias)
                gradients = gradients._replace(norm_bias=norm_bias)
        if self.max_gradient_norm is not None:
            gradients = jax.tree.map(self._bounded, gradients)
        if writes.tensor_scale is not None:
            leaves, structure = jax.tree.flatten(gradients)
            scales = writes.tensor_scale.T
            leaves = [_times(s, x) for s, x in zip(scales, leaves, strict=True)]
            gradients = jax.tree.unflatten(structure, leaves)
        skipped = writes.real == 0

        # A skipped write takes no step, keeps the momentum and forgets nothing.
        taken = jnp.where(skipped, 0.0, 1.0)
        steps = jax.tree.map(jnp.negative, gradients)
        # Each order smooths the one before it; the first smooths the steps themselves.
        surprises, momentum = [], []
        for order in range(self.momentum_order):
            kept = jnp.where(skipped, 1.0, writes.momentum[:, order])
            start = jax.tree.map(lambda x, order=order: x[order], memory.momentum)
            steps = jax.tree.map(lambda x: _times(taken, x), steps)
            steps = _linear_recurrence(kept, steps, start)
            surprises.append(steps)
            momentum.append(jax.tree.map(lambda x: x[-1], steps))
        if writes.combine is not None:
            # A learned mix of all orders, in place of the last one alone.
            shares = writes.combine.T
            steps = jax.tree.map(
                lambda *orders: sum(_times(s, x) for s, x in zip(shares, orders, strict=True)),
                *surprises,
            )
        if self.orthogonalize:
            layers = tuple(jax.vmap(_orthogonalize)(x) for x in steps.layers)
            steps = steps._replace(layers=layers)
        steps = jax.tree.map(lambda x: _times(taken, x), steps)
        kept = jnp.where(skipped, 1.0, 1.0 - writes.forget)
        after = _linear_recurrence(kept, steps, memory.weights)
        after = jax.tree.map(
            lambda first, rest: jnp.concatenate([first[None], rest]), memory.weights, after
        )
        # With 0 orders the momentum has an empty axis, which is unchanged.
        momentum = jax.tree.map(lambda *x: jnp.stack(x), *momentum) if momentum else memory.momentum
        return after, momentum, losses

    def read(self, weights: TitansNetwork, query: Float[Array, "tokens key"]) -> TokenValues:
        """Reads token t with the weights after `(t + 1) // write_size` of the writes."""
        tokens, groups = query.shape[0], jax.tree.leaves(weights)[0].shape[0]
        # Shifted by one place, the tokens that read the same weights are one group.
        behind = groups * self.write_size - 1 - tokens
        query = jnp.pad(query, ((1, behind), (0, 0)))
        read = jax.vmap(self.apply)(weights, query.reshape(groups, self.write_size, -1))
        return read.reshape(groups * self.write_size, -1)[1 : tokens + 1]

    def _writes(self, chunk: GradientChunk) -> TitansWrites:
        """The complete writes of a chunk."""
        size = self.write_size
        # Tokens behind the last complete write are only read.
        number = chunk.target.shape[0] // size
        first = jax.tree.map(lambda x: x[: number * size], chunk)

        def split(x: jax.Array) -> jax.Array:
            return x.reshape(number, size, *x.shape[1:])

        rate = self.learning_rate if first.rates is None else first.rates[:, 0]
        # A token that must not write has a rate of 0.
        rate = rate * first.write_weight
        momentum = jnp.full((number, self.momentum_order), self.momentum, rate.dtype)
        if first.momentum is not None:
            # One momentum for a write: the mean over its tokens.
            kept = jnp.mean(split(first.momentum), axis=1)
            momentum = jnp.broadcast_to(kept[:, None], momentum.shape)
        return TitansWrites(
            key=split((first.query if first.key is None else first.key)[:, 0]),
            value=split(first.target),
            rate=split(rate),
            momentum=momentum,
            forget=jnp.full((number,), self.forget, rate.dtype),
            real=jnp.any(split(first.write_weight) != 0, axis=1).astype(rate.dtype),
        )

    def _loss(
        self, network: TitansNetwork, key: jax.Array, value: jax.Array, rate: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        errors = (self.apply(network, key) - value) ** 2
        losses = errors.sum(-1) if self.loss == "sum" else errors.mean(-1)
        return jnp.sum(rate * losses), losses

    def _bounded(self, gradients: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
        """Norms r become h (1 + tanh(r / h)) with h half the bound, so they are never below h."""
        assert self.max_gradient_norm is not None
        half = self.max_gradient_norm / 2
        norm = jax.vmap(frobenius_norm)(gradients)
        bounded = half * (1.0 + jnp.tanh(norm / half))
        return _times(bounded / jnp.where(norm > 0, norm, 1.0), gradients)


def scale_steps(
    base: TitansNetwork, weights: TitansNetwork, factors: Float[Array, " n"]
) -> TitansNetwork:
    """`base + factors (weights - base)` for weights `[n, ...]`: a chunk's summed steps, scaled."""
    return jax.tree.map(
        lambda first, x: first[None] + _times(factors.astype(x.dtype), x - first[None]),
        base,
        weights,
    )


def _times(scalars: Float[Array, " n"], x: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    return scalars.reshape(-1, *[1] * (x.ndim - 1)) * x


def _linear_recurrence(kept: Float[Array, " n"], added: Any, start: Any) -> Any:
    """`y[i] = kept[i] y[i - 1] + added[i]` from `start`, leaves `[n, ...]`, in parallel.

    Each y is a sum whose coefficients, products of `kept`, are the same for every weight. So one
    matrix product computes all of them; a scan would read all weights at every step.
    """
    number = kept.shape[0]
    later = jnp.tri(number, k=-1, dtype=bool)
    products = jnp.cumprod(jnp.where(later, kept[:, None], 1.0), axis=0)  # Of kept[j + 1 : i + 1].
    products = jnp.where(later | jnp.eye(number, dtype=bool), products, 0.0)
    since_start = jnp.cumprod(kept)

    def combine(added: jax.Array, start: jax.Array) -> jax.Array:
        sums = jnp.einsum("ij,j...->i...", products, added, precision=jax.lax.Precision.HIGHEST)
        return sums + _times(since_start, jnp.broadcast_to(start, added.shape))

    return jax.tree.map(combine, added, start)


def _orthogonalize(x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Approximately the nearest matrix with all singular values 1; zero for a zero matrix."""
    return newton_schulz(x / jnp.maximum(frobenius_norm(x), _MUON_EPSILON), _NEWTON_SCHULZ)
