"""Decays between the tokens of a chunk, per head or per key channel, without over- or underflow."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

HIGHEST = "highest"
# exp of anything below is 0 in float32 and float64; -inf would give NaN as 0 * inf in a product.
LOWEST_LOG_DECAY = -1e4


_LARGEST_LOG_RATE = 60.0
_LOWEST_SOFTPLUS = -20.0  # Below, softplus(x) is exp(x) to rounding.


def softplus_decay(log_rate: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`-exp(log_rate) softplus(x)`, a token's log decay, at least `LOWEST_LOG_DECAY`.

    Finite, as are its gradients, for any finite arguments: where the rate alone would overflow,
    the product is the exponential of a sum.

    Args:
      log_rate: broadcasts against `x`.
      x: the time step before softplus.
    """
    usual = -jnp.exp(jnp.minimum(log_rate, _LARGEST_LOG_RATE)) * jax.nn.softplus(x)
    log_softplus = jnp.where(
        x < _LOWEST_SOFTPLUS, x, jnp.log(jax.nn.softplus(jnp.maximum(x, _LOWEST_SOFTPLUS)))
    )
    exponent = jnp.minimum(log_rate + log_softplus, float(np.log(-LOWEST_LOG_DECAY)))
    decay = jnp.where(log_rate > _LARGEST_LOG_RATE, -jnp.exp(exponent), usual)
    return jnp.maximum(decay, LOWEST_LOG_DECAY)


class ChunkDecay(NamedTuple):
    """The decays of one chunk, all at most 1; `rate` is the key width, or 1 for one per head.

    The decay between tokens r > s is not a quotient of decays from the chunk's start, which
    overflow, but a product of two parts: halve the chunk again and again; at exactly one level do
    r and s lie in different halves of one block. There the decay is that from s to the block's
    middle times that from the middle to r, and each token has one number per level and channel.
    All of them are exponentials of sums of terms `<= 0`, in which nothing cancels.

    Attributes:
      from_start: from before the chunk's first token to after each token's own decay.
      to_end: from after each token's own decay to the chunk's end.
      parts: of each level, up to the block's middle in its first half, from there in its second.
    """

    from_start: Float[Array, "batch heads chunk rate"]
    to_end: Float[Array, "batch heads chunk rate"]
    parts: Float[Array, "batch heads levels chunk rate"]

    def products(
        self,
        rows: Float[Array, "batch heads chunk rate"],
        columns: Float[Array, "batch heads chunk rate"],
    ) -> Float[Array, "batch heads chunk chunk"]:
        """`sum_k rows[r, k] columns[s, k] decay[r, s, k]` at `[r, s]`, 0 where `r < s`."""
        second, pairs = _halves(rows.shape[2])[:2]
        faded = self.parts * jnp.where(
            second[None, None, :, :, None], rows[:, :, None], columns[:, :, None]
        )
        every = jnp.einsum("bhlrk,bhlsk->bhlrs", faded, faded, precision=HIGHEST)
        # No sums over levels, and none over channels but as products of matrices: for float32 on a
        # CPU, XLA 0.10.2 to 0.12 may fuse a sum with the products around it into a program that
        # reads memory which nothing has written.
        alike = jnp.einsum("bhrk,bhsk->bhrs", rows, columns, precision=HIGHEST)
        found = jnp.where(np.eye(rows.shape[2], dtype=bool)[None, None], alike, 0)
        for level, pair in enumerate(pairs):
            found = jnp.where(pair[None, None], every[:, :, level], found)
        return found

    def sums(
        self,
        weights: Float[Array, "batch heads chunk chunk"],
        columns: Float[Array, "batch heads chunk rate"],
    ) -> Float[Array, "batch heads chunk rate"]:
        """`sum_s weights[r, s] columns[s, k] decay[r, s, k]` at `[r, k]`, over `s <= r`."""
        pairs = _halves(weights.shape[2])[1]
        alike = jnp.diagonal(weights, axis1=2, axis2=3)
        found = alike[..., None] * columns
        for level, pair in enumerate(pairs):
            part = self.parts[:, :, level]
            # Up to the middle with the columns, from there with the sums of the second half.
            met = jnp.where(pair[None, None], weights, 0)
            found += part * jnp.einsum("bhrs,bhsk->bhrk", met, part * columns, precision=HIGHEST)
        return found

    def between(self) -> Float[Array, "batch heads chunk chunk"]:
        """The decay from token s to token r at `[r, s]`, one per head; 0 where `r < s`."""
        ones = jnp.ones_like(self.from_start)
        return self.products(ones, ones)


def chunk_decay(log_decay: Float[Array, "batch heads chunk rate"]) -> ChunkDecay:
    """The decays of a chunk from the log of the share kept by each token, `<= 0` or -inf."""
    sums = _halves(log_decay.shape[2])[2].astype(log_decay.dtype)
    log_decay = jnp.maximum(log_decay, LOWEST_LOG_DECAY)
    decay = jnp.exp(jnp.einsum("lrt,bhtk->bhlrk", sums, log_decay, precision=HIGHEST))
    return ChunkDecay(decay[:, :, 0], decay[:, :, 1], decay[:, :, 2:])


def _halves(chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where tokens lie at each level, as tables that are constants of a program.

    Returns:
      Whether a token lies in its block's second half, `[levels, chunk]`; whether r and s lie in
      the second and first half of one block, `[levels, chunk, chunk]`; and the tokens t whose
      decays `chunk_decay` sums for each token, `[2 + levels, chunk, chunk]`.
    """
    index = np.arange(chunk)
    half = 2 ** np.arange((chunk - 1).bit_length())[:, None]
    block = index // (2 * half)
    second = index // half % 2 == 1
    pairs = second[:, :, None] & ~second[:, None, :] & (block[:, :, None] == block[:, None, :])
    token, other = index[:, None], index[None, :]
    middle = (2 * block + 1) * half
    from_middle = (middle[:, :, None] <= other) & (other <= token)
    to_middle = (token < other) & (other < middle[:, :, None])
    parts = np.where(second[:, :, None], from_middle, to_middle)
    sums = np.concatenate([[other <= token], [other > token], parts])
    return second, pairs, sums
