"""A mixture of experts in place of an MLP: a router sends each token to a few of them."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.numerics import compute_dtype
from fwpkm_jax.layers.mlp import ACTIVATIONS, Activation, SwiGLU
from fwpkm_jax.layers.parameters import LogicalAxes, linear_map, parameter
from fwpkm_jax.layers.partition import HEADS, Partition
from fwpkm_jax.literals import Count, NotNegative, check_fields

_LARGEST_BLOCK = 128  # Tokens that one expert takes at a time.


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts, each a SwiGLU layer."""

    num_experts: Count = 8
    """Experts a token can be sent to."""
    top_k: int = 2
    """Experts a token is sent to."""
    hidden_dim: Count = 512
    """Hidden width of each expert."""
    shared_dim: Count | None = None
    """Hidden width of one more expert that sees every token, behind a sigmoid gate; None: none."""
    renormalize: bool = True
    """Weights the chosen experts by their probabilities' shares, which sum to 1; off: by the
    probabilities."""
    balance_weight: NotNegative = 0.001
    """Weight in the training loss of the term that spreads tokens over experts; 0: none."""

    def __post_init__(self):
        check_fields(self)
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and num_experts={self.num_experts}."
            )


class RouterLoad(NamedTuple):
    """How a layer's router spread the tokens of a call.

    Attributes:
      share: tokens sent to each expert, as a share of all tokens; sums to `top_k`.
      probability: mean probability of each expert.
    """

    share: Float[Array, " experts"]
    probability: Float[Array, " experts"]


class ExpertsOutput(NamedTuple):
    """What the layer returns.

    Attributes:
      output: `[batch, length, model]`.
      load: of the router.
    """

    output: Float[Array, "batch length model"]
    load: RouterLoad


class Experts(nnx.Module):
    """`sum over chosen e of p_e expert_e(x)`, and the shared expert where there is one.

    Tokens are sorted by expert and worked on in blocks; none is dropped, so that no output depends
    on other tokens. Over a mesh the experts lie along the axis `model`: each device runs its own
    for all tokens of its sequences, and the results are summed.

    References: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961
    (balance).
    """

    def __init__(
        self,
        config: ExpertsConfig,
        model_dim: int,
        *,
        init_std: float = 0.02,
        activation: Activation = "silu",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Draws the weights, which are float32.

        Args:
          config: the layer's shape.
          model_dim: width of input and output.
          init_std: standard deviation of the initial weights.
          activation: of every expert.
          dtype: of the computation, None for the input's.
          rngs: the stream `params`.
        """
        init = nnx.initializers.normal(init_std)
        linear = functools.partial(linear_map, init_std=init_std, dtype=dtype, rngs=rngs)

        def kernels(*shape: int, axes: LogicalAxes) -> nnx.Param:
            return parameter(init(rngs.params(), shape), "matrix", axes)

        experts, hidden = config.num_experts, config.hidden_dim
        self.config, self.dtype = config, dtype
        self.activation: Activation = activation
        self.router = linear(model_dim, experts)
        self.gate_up_kernel = kernels(
            experts, model_dim, 2 * hidden, axes=("experts", "embed", None)
        )
        self.down_kernel = kernels(experts, hidden, model_dim, axes=("experts", None, "embed"))
        shared = None
        if config.shared_dim is not None:
            shared = SwiGLU(
                model_dim,
                config.shared_dim,
                init_std=init_std,
                activation=activation,
                dtype=dtype,
                rngs=rngs,
            )
        self.shared = shared
        self.shared_gate = None if shared is None else linear(model_dim, 1)

    def __call__(
        self, x: Float[Array, "batch length model"], *, partition: Partition | None = None
    ) -> ExpertsOutput:
        """The layer's output, and how the router spread the tokens.

        Args:
          x: `[batch, length, model]`.
          partition: of the tokens and the experts over devices.
        """
        check_arrays(x=(x, "float batch length model"), sizes={"model": self.router.in_features})
        logits = self.router(x)
        # In at least float32: rounded probabilities would tie, and ties choose other experts.
        probabilities = jax.nn.softmax(logits.astype(compute_dtype(logits.dtype)), axis=-1)
        dtype = x.dtype if self.dtype is None else self.dtype
        weights = (self.gate_up_kernel[...].astype(dtype), self.down_kernel[...].astype(dtype))
        if partition is None:
            output, chosen = self._run(x, probabilities, *weights, first=0)
        else:
            partition.check_divides("experts.num_experts", self.config.num_experts, HEADS)

            def of_device(x, probabilities, gate_up, down):
                first = jax.lax.axis_index(HEADS) * gate_up.shape[0]
                output, chosen = self._run(x, probabilities, gate_up, down, first=first)
                # Each token's experts may lie on several devices; their outputs add up.
                return jax.lax.psum(output, HEADS), chosen

            of_tokens = partition.tokens()
            output, chosen = partition.run(
                of_device,
                in_specs=(of_tokens, of_tokens, P(HEADS), P(HEADS)),
                out_specs=(of_tokens, of_tokens),
            )(x, probabilities, *weights)
        if self.shared is not None and self.shared_gate is not None:
            output = output + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
        experts = jnp.arange(self.config.num_experts, dtype=chosen.dtype)
        # By comparison, not by a scatter, which a GPU does one number at a time.
        is_chosen = chosen[..., None] == experts[None, None, None]
        load = RouterLoad(
            share=jnp.mean(jnp.sum(is_chosen.astype(probabilities.dtype), axis=2), axis=(0, 1)),
            probability=jnp.mean(probabilities, axis=(0, 1)),
        )
        return ExpertsOutput(output, load)

    def _run(
        self,
        x: Float[Array, "batch length model"],
        probabilities: Float[Array, "batch length experts"],
        gate_up: Float[Array, "own model twice_hidden"],
        down: Float[Array, "own hidden model"],
        *,
        first: jax.Array | int,
    ) -> tuple[Float[Array, "batch length model"], Int[Array, "batch length places"]]:
        """The part of the output that the experts from number `first` on make; all chosen ones."""
        top_k, own = self.config.top_k, gate_up.shape[0]
        # Every device finds all experts of its tokens, and works for those it holds.
        chosen_weight, chosen = jax.lax.top_k(probabilities, top_k)
        if self.config.renormalize:
            chosen_weight = chosen_weight / jnp.sum(chosen_weight, axis=-1, keepdims=True)
        tokens = x.reshape(-1, x.shape[-1]).astype(gate_up.dtype)
        # Other devices' experts come last, and their tokens get no place.
        expert = chosen.reshape(-1) - first
        expert = jnp.where((expert >= 0) & (expert < own), expert, own)
        places = _places(expert, own, of=expert.size)
        blocks = places.expert.shape[0]
        # Places that stay empty point behind the tokens, and read zeros.
        source = jnp.full((blocks * places.size,), tokens.shape[0], jnp.int32)
        token = jnp.arange(expert.size, dtype=jnp.int32) // top_k
        source = source.at[places.place].set(token, mode="drop")
        rows = tokens.at[source].get(mode="fill", fill_value=0)

        def work(block: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, number = block
            gate, up = jnp.split(rows @ gate_up[number], 2, axis=-1)
            return (ACTIVATIONS[self.activation](gate) * up) @ down[number]

        # One block after the other: each multiplies by the kernels of its own expert alone.
        done = jax.lax.map(work, (rows.reshape(blocks, places.size, -1), places.expert))
        done = done.reshape(-1, done.shape[-1])
        results = done.at[places.place].get(mode="fill", fill_value=0)
        weight = chosen_weight.reshape(-1, 1).astype(results.dtype)
        output = jnp.sum((results * weight).reshape(-1, top_k, results.shape[-1]), axis=1)
        return output.reshape(x.shape), chosen


class _Places(NamedTuple):
    """Where tokens stand when each expert's fill blocks of `size`.

    Attributes:
      place: of each token and chosen expert; beyond all blocks where the expert is another's.
      expert: that works on each block.
      size: of a block.
    """

    place: Int[Array, " pairs"]
    expert: Int[Array, " blocks"]
    size: int


def _places(expert: Int[Array, " pairs"], number: int, *, of: int) -> _Places:
    """Sorts `of` pairs by their expert, `number` for those left out."""
    size = 1
    # Blocks as large as an expert has tokens on average, by powers of two: few shapes compile.
    while size < _LARGEST_BLOCK and size * number < of:
        size *= 2
    # Enough for any distribution: each expert may leave one block partly empty.
    blocks = of // size + min(number, of)
    counts = jnp.zeros((number + 1,), jnp.int32).at[expert].add(1)
    needed = -(-counts // size)
    ends = jnp.cumsum(needed, dtype=jnp.int32)
    # Stable, so that an expert works on its tokens in their order.
    order = jnp.argsort(expert, stable=True)
    # A pair's number among those of its expert, in the order of tokens.
    rank = (
        jnp.arange(of, dtype=jnp.int32)
        - (jnp.cumsum(counts, dtype=jnp.int32) - counts)[expert[order]]
    )
    place = (ends - needed)[expert[order]] * size + rank
    place = jnp.where(expert[order] < number, place, blocks * size)
    place = jnp.zeros((of,), jnp.int32).at[order].set(place)
    block = jnp.arange(blocks, dtype=jnp.int32)
    of_block = jnp.searchsorted(ends[:number], block, side="right")
    return _Places(place, jnp.minimum(of_block, number - 1).astype(jnp.int32), size)


def balance_loss(loads: dict[str, RouterLoad]) -> Float[Array, ""]:
    """How unevenly experts are used: their number times the sum of share x probability.

    It is `top_k` at its least, where all experts are used alike. Layers are taken together.

    Args:
      loads: by layer; at least one.
    """
    share, probability = (jnp.mean(jnp.stack(x), axis=0) for x in zip(*loads.values(), strict=True))
    # The share is a count without a gradient; the probability carries it.
    return share.shape[0] * jnp.sum(jax.lax.stop_gradient(share) * probability)
