"""A fast-weight SwiGLU: one gradient step of a dense network per chunk."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import Queries, TokenValues
from fwpkm_jax.core.checks import check_key
from fwpkm_jax.core.chunks import Chunk, StepOutput, cast
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks
from fwpkm_jax.core.targets import shift_left
from fwpkm_jax.literals import Bound, Checked, Count, Natural, NotNegative, Positive
from fwpkm_jax.rules.base import AbstractChunkRule, check_memory, check_query


class FwMLPMemory(NamedTuple):
    """The six fast tensors of one network; kernels multiply from the right."""

    up_kernel: Float[Array, "key hidden"]
    up_bias: Float[Array, " hidden"]
    gate_kernel: Float[Array, "key hidden"]
    gate_bias: Float[Array, " hidden"]
    down_kernel: Float[Array, "hidden value"]
    down_bias: Float[Array, " value"]


class FwMLPInfo(NamedTuple):
    """Measures of one write.

    Attributes:
      update_norm: Euclidean norm of the change of all six tensors.
    """

    update_norm: Float[Array, ""]


@dataclass(frozen=True, kw_only=True)
class FwMLP(Checked, AbstractChunkRule):
    """A SwiGLU that takes one step on its mean error per chunk: the paper's baseline.

    The error is averaged over the tokens that write and over the features, without a factor 1/2.
    Everything is computed in the dtype of the memory, also if the tokens have another one.

    References: Zhao and Jones 2026, arXiv:2601.00671, Appendix C.

    Example:
      >>> import jax
      >>> from fwpkm_jax import FwMLP
      >>> memory = FwMLP(key_dim=4, value_dim=6, hidden_dim=8).init(jax.random.key(0))
      >>> sorted({leaf.shape for leaf in jax.tree.leaves(memory)})
      [(4, 8), (6,), (8,), (8, 6)]
    """

    key_dim: Count = 512
    """Width of a query."""
    value_dim: Annotated[int, Bound(2)] = 512
    """Width of a value."""
    hidden_dim: Count = 2304
    """Width of the hidden layer."""
    lookahead: Natural = 1
    """A token's target is the value this many tokens later."""
    target: Literal["later", "mean"] = "later"
    """later: the value `lookahead` tokens on, as the paper says. mean: the average of the values
    from the token's own to that one, as the authors' release has it."""
    learning_rate: NotNegative = 0.1
    """Size of the write."""
    weight_decay: NotNegative = 0.0
    """Decay of all six tensors at each write."""
    loss: Literal["squared", "absolute"] = "squared"
    """The loss of a write: the mean squared or the mean absolute error."""
    write_clip: Positive | None = None
    """Largest absolute entry of a write's gradients, before decay; the release clips at 1 if it
    clips. None: not clipped."""

    long_writes = False  # A single step on the mean error of a whole text can diverge.

    @classmethod
    def tiny(cls) -> "FwMLP":
        return cls(key_dim=6, value_dim=4, hidden_dim=5, learning_rate=0.5, weight_decay=0.01)

    def init(self, rng: jax.Array) -> FwMLPMemory:
        """Kernels normal with variance 1 / fan-in, biases zero. The paper does not specify this."""
        check_key(rng)

        def kernel(rng: jax.Array, inputs: int, outputs: int) -> jax.Array:
            return inputs**-0.5 * jax.random.normal(rng, (inputs, outputs), jnp.float32)

        up, gate, down = jax.random.split(rng, 3)
        key, hidden, value = self.key_dim, self.hidden_dim, self.value_dim
        return FwMLPMemory(
            up_kernel=kernel(up, key, hidden),
            up_bias=jnp.zeros((hidden,), jnp.float32),
            gate_kernel=kernel(gate, key, hidden),
            gate_bias=jnp.zeros((hidden,), jnp.float32),
            down_kernel=kernel(down, hidden, value),
            down_bias=jnp.zeros((value,), jnp.float32),
        )

    def targets(
        self, value: Float[Array, "batch length value"]
    ) -> Float[Array, "batch length value"]:
        if self.target == "later":
            return super().targets(value)
        seen = [shift_left(value, ahead) for ahead in range(self.lookahead + 1)]
        return sum(seen[1:], start=seen[0]) * (1 / len(seen))

    def read(self, memory: FwMLPMemory, query: Queries) -> tuple[TokenValues, None]:
        check_memory(self, memory)
        check_query(self, query)
        # A dense memory has one head: its network reads whole keys.
        x = query[:, 0].astype(memory.up_kernel.dtype)
        # Full precision on every device, also for gradients: a write is small compared with the
        # weights.
        with jax.default_matmul_precision("highest"):
            up = x @ memory.up_kernel + memory.up_bias[None]
            gate = x @ memory.gate_kernel + memory.gate_bias[None]
            hidden = up * jax.nn.silu(gate)
            return hidden @ memory.down_kernel + memory.down_bias[None], None

    def step(self, memory: FwMLPMemory, chunk: Chunk) -> StepOutput:
        chunk = cast(chunk, memory.up_kernel.dtype)
        num_written = _num_written(chunk)
        gradient, output = self._gradient(memory, chunk, num_written)
        change = self._change(memory, gradient, num_written)
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(change))
        info = FwMLPInfo(jnp.sqrt(squares))
        memory = jax.tree.map(jnp.add, memory, change)
        return StepOutput(memory, output, None, jax.lax.stop_gradient(info))

    def write_blocks(self, memory: FwMLPMemory, blocks: ChunkBlocks) -> FwMLPMemory:
        dtype = memory.up_kernel.dtype
        zero = jnp.zeros((), dtype)
        # Twice over the blocks: each part of the gradient is divided by the tokens of all.
        num_written = blocks.fold(
            lambda number, total: total + _num_written(cast(blocks.block(number), dtype)), zero
        )

        def add(number: jax.Array, gradient: FwMLPMemory) -> FwMLPMemory:
            chunk = cast(blocks.block(number), dtype)
            return jax.tree.map(jnp.add, gradient, self._gradient(memory, chunk, num_written)[0])

        gradient = blocks.fold(add, jax.tree.map(jnp.zeros_like, memory))
        return jax.tree.map(jnp.add, memory, self._change(memory, gradient, num_written))

    def _gradient(
        self, memory: FwMLPMemory, chunk: Chunk, num_written: Float[Array, ""]
    ) -> tuple[FwMLPMemory, TokenValues]:
        """These tokens' part of the gradient of a mean over `num_written`, and their reads."""

        def loss(memory: FwMLPMemory) -> tuple[Float[Array, ""], TokenValues]:
            output, _ = self.read(memory, chunk.query)
            # A mean over the tokens that write, so that a chunk of any length takes a step of one
            # size.
            size = jnp.square if self.loss == "squared" else jnp.abs
            errors = chunk.write_weight * jnp.mean(size(output - chunk.target), axis=-1)
            return jnp.sum(errors) / jnp.maximum(num_written, 1.0), output

        return jax.grad(loss, has_aux=True)(memory)

    def _change(
        self, memory: FwMLPMemory, gradient: FwMLPMemory, num_written: Float[Array, ""]
    ) -> FwMLPMemory:
        # A chunk without a pair, such as padding, is not written, so the weights do not decay.
        if self.write_clip is not None:
            limit = self.write_clip
            gradient = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), gradient)
        rate = jnp.where(num_written > 0, self.learning_rate, 0.0).astype(num_written.dtype)
        return jax.tree.map(lambda g, w: -rate * (g + self.weight_decay * w), gradient, memory)


def _num_written(chunk: Chunk) -> Float[Array, ""]:
    """How many tokens of a chunk write."""
    return jnp.sum((chunk.write_weight != 0).astype(chunk.write_weight.dtype))
