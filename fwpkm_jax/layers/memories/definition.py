"""A memory layer on one page: `x, memory -> y, memory`, for any rule that reads before it writes.

This is the definition, to read and to test against. `layers.memories.fast_weight.FastWeight`
computes the same, and its gradients. The page has all options of the layer's config but those of
norms and documents, `query_norm`, `value_norm` and `documents`; and it has no
`starts`, `write`, `pairing`, `partition` or narrow dtypes. How a rule reads and writes one chunk is
its own `step`; for FwPKM that is `core.slots.definition.read_and_write`.

References: Zhao and Jones 2026, arXiv:2601.00671, section 3; the numbers of equations are its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.chunks import Memory
from fwpkm_jax.core.targets import WriteWeights
from fwpkm_jax.layers.memories.fast_weight import FastWeight


def read_and_write(
    layer: FastWeight,
    x: Float[Array, "batch length model"],
    memory: Memory,
    mask: TokenMask | None = None,
) -> tuple[Float[Array, "batch length model"], Memory]:
    """What the block adds to the residual stream, and the memory after the last write.

    Args:
      memory: fast weights, leaves `[groups, ...]`; neighbours in the batch share a memory.
      mask: 1 for real tokens, 0 for padding; None: all are real.
    """
    config, rule = layer.config, layer.config.rule
    (batch, length, _), groups = x.shape, len(jax.tree.leaves(memory)[0])

    # Each projection has a norm of its own.
    query = _project(layer.query_norm, layer.query_proj, x)
    query = query.reshape(batch, length, rule.num_heads, rule.key_dim)
    value = _project(layer.value_norm, layer.value_proj, x)
    value = value - jnp.mean(value, axis=-1, keepdims=True)
    value = value / (jnp.std(value, axis=-1, ddof=1, keepdims=True) + 1e-6)
    gate = jnp.ones((batch, length), x.dtype)
    if config.has_gate:
        gate = jax.nn.sigmoid(jnp.mean(_project(layer.gate_norm, layer.gate_proj, x), axis=-1))

    # A token should read the value `lookahead` tokens on, and writes if that is in its chunk.
    ahead = rule.lookahead
    real = jnp.ones_like(gate) if mask is None else mask.astype(gate.dtype)
    target = jnp.pad(value, [(0, 0), (0, ahead), (0, 0)])[:, ahead:]
    real_target = jnp.pad(real, [(0, 0), (0, ahead)])[:, ahead:]
    position = jnp.arange(length)
    end = jnp.minimum((position // config.chunk_size + 1) * config.chunk_size, length)
    paired = jnp.broadcast_to((position + ahead < end).astype(gate.dtype), gate.shape)
    loss_weight = gate if config.weight_by_gate else jnp.ones_like(gate)
    weights = WriteWeights(loss_weight * paired * real * real_target, paired, real)
    tokens = rule.chunk(query, target, weights)

    # Chunk by chunk: read, then write. Sequences of one group are one chunk of one memory.
    reads = []
    for start in range(0, length, config.chunk_size):
        chunk = jax.tree.map(lambda x, i=start: x[:, i : i + config.chunk_size], tokens)
        chunk = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[2:]), chunk)
        memory, read, *_ = jax.vmap(rule.step)(memory, chunk)
        reads.append(read.reshape(batch, -1, rule.value_dim))
    read = jnp.concatenate(reads, axis=1)

    gate = gate[..., None]
    output = gate * read + (1 - gate) * value if config.gate_output else read + value  # Eq. 12
    y = _project(layer.out_norm, layer.out_proj, output)
    y = gate * y if config.gate_residual else y
    if config.full_read is not None:  # What holds nothing adds nothing.
        y = y * jnp.clip(jnp.mean(read**2, axis=-1, keepdims=True) / config.full_read**2, max=1)
    return y, memory


def _project(norm: Any, linear: Any, x: jax.Array) -> jax.Array:
    """A linear map of the input at unit root mean square times the norm's scale."""
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + norm.eps)
    return x * norm.scale[None, None] @ linear.kernel[...] + linear.bias[None, None]
