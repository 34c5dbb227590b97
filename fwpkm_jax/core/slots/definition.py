"""FwPKM on one page: what one chunk of tokens reads, and how it changes the memory.

This is the definition in plain JAX, to read and to test against. `rules.fwpkm.FwPKM` computes the
same reads, writes and gradients for whole sequences and in less time.

The page has the rule's options `num_heads`, `top_k`, `score`, `learning_rate`, `value_step` and
`addressing_weight`. It lacks `key_loss`, `nonlinearity`, `temperature`, `inner_steps`,
`write_clip`, `weight_decay`, `retention`, `backend`, a chunk's `factor`, and the order among equal
scores, where FwPKM prefers the lower slot.

References: Zhao and Jones 2026, arXiv:2601.00671, section 3; the numbers of equations are its own.
"""

import jax
import jax.numpy as jnp

from fwpkm_jax.core.array_types import SubKeys, TokenValues, ValueTable
from fwpkm_jax.core.slots.write import SlotChunk


def read_and_write(
    keys: SubKeys,
    values: ValueTable,
    chunk: SlotChunk,
    *,
    top_k: int,
    score: str = "idw",
    learning_rate: float = 1.0,
    value_step: float | None = None,
    addressing_weight: float = 1.0,
) -> tuple[SubKeys, ValueTable, TokenValues]:
    """The memory after one chunk, and what each token read before the write.

    Args:
      keys: `[heads, 2, subkeys, half]`: for each head, sub-keys of rows and of columns.
      values: `[subkeys**2, value]`; slot = row * subkeys + column.
      chunk: leaves `[tokens, ...]`: queries, targets, and the weights of the tokens.
      top_k: slots that each head of a token reads.
      score: `idw` (inverse distance) or `dot` (inner product).
      learning_rate: size of the write, of values and keys.
      value_step: multiplies the value gradient; None: heads * top_k.
      addressing_weight: multiplies the addressing loss.

    Returns:
      Keys and values after the write, and reads `[tokens, value]`.
    """
    heads, _, subkeys, half = keys.shape
    halves = chunk.query.reshape(-1, heads, 2, half)
    tokens = len(halves)

    def scores(keys: SubKeys) -> jax.Array:  # Eqs. 5 and 20, [tokens, heads, 2, subkeys].
        if score == "dot":
            return jnp.einsum("thpk,hpsk->thps", halves, keys)
        return -jnp.log(1e-3 + jnp.sum((halves[..., None, :] - keys[None]) ** 2, axis=-1))

    # Read: the best sub-keys of each half (Eq. 6), their best pairs, which are slots (Eq. 7).
    ids = jax.lax.top_k(scores(keys), top_k)[1]
    best = jnp.take_along_axis(scores(keys), ids, axis=-1)
    pairs = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).reshape(tokens, heads, -1)
    slots = (ids[:, :, 0, :, None] * subkeys + ids[:, :, 1, None, :]).reshape(pairs.shape)
    winners = jax.lax.top_k(pairs, top_k)[1]
    slots = jnp.take_along_axis(slots, winners, axis=-1).reshape(tokens, -1)
    weights = jax.nn.softmax(jnp.take_along_axis(pairs, winners, axis=-1).reshape(tokens, -1))
    read = jnp.einsum("tp,tpv->tv", weights, values[slots])  # Eq. 11

    # Write the values: a slot moves by the mean error of its readers (Eqs. 13 to 17).
    errors = chunk.write_weight[:, None] * (read - chunk.target)
    counted = jnp.broadcast_to(chunk.counted[:, None], slots.shape)
    counts = jnp.zeros(len(values), counted.dtype).at[slots].add(counted)
    step = learning_rate * (heads * top_k if value_step is None else value_step)
    moves = -step * weights / jnp.maximum(counts[slots], 1.0)
    new_values = values.at[slots].add(moves[..., None] * errors[:, None, :])

    # Write the keys: a step on the negative entropy of the mean access to the sub-keys (Eq. 18).
    def addressing_loss(keys: SubKeys) -> jax.Array:
        access = jax.nn.softmax(jnp.take_along_axis(scores(keys), ids, axis=-1))
        access = access * chunk.addressed[:, None, None, None]
        usage = jnp.zeros((2, subkeys), keys.dtype).at[jnp.arange(2)[:, None], ids].add(access)
        usage = usage / jnp.maximum(heads * jnp.sum(chunk.addressed), 1e-20)
        return addressing_weight * jnp.sum(usage * jnp.log(usage + 1e-8))

    new_keys = keys - learning_rate * jax.grad(addressing_loss)(keys)
    return new_keys, new_values, read
