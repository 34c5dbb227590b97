"""Product-key memory: a large table of slots, trained by the slow optimiser, in place of an MLP."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.shared_table import (
    MemoryAxes,
    columns_for_tokens,
    gather_tokens,
    own_slots,
    own_tokens,
)
from fwpkm_jax.layers.partition import BATCH, Partition
from pallas_kernels.dispatch import Backend
from pallas_kernels.product_top_k import product_top_k
from pallas_kernels.slot_read import slot_read


@dataclass(frozen=True, kw_only=True)
class PKMConfig:
    """A product-key memory layer."""

    num_subkeys: int = 512
    """Sub-keys per codebook; the memory has num_subkeys**2 slots."""
    key_dim: int = 512
    """Width of a head's query, both halves together; even."""
    value_dim: int = 512
    """Width of a slot's value."""
    num_heads: int = 4
    """Queries per token; their reads are summed from one value table."""
    top_k: int = 32
    """Slots read per head."""
    query_norm: bool = True
    """RMS norm over the queries of all heads together."""
    gated: bool = True
    """Multiplies the read by SiLU of a projection of the input."""
    backend: Backend = "auto"
    """What selects and reads the slots: the device's kernels where they run (auto), plain JAX
    (reference), or pallas."""

    def __post_init__(self):
        if self.key_dim < 2 or self.key_dim % 2:
            raise ValueError(f"key_dim={self.key_dim} must be even (two codebooks).")
        if not 1 <= self.top_k <= self.num_subkeys:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and num_subkeys={self.num_subkeys}."
            )
        if self.num_heads < 1 or self.value_dim < 1:
            raise ValueError(
                f"num_heads={self.num_heads} and value_dim={self.value_dim} must be at least 1."
            )


class PKM(nnx.Module):
    """Reads slots by dot-product addressing, one softmax per head (spec: section 2).

    out = Linear(read * SiLU(Linear(x))). Keys and values are parameters.

    References: Lample et al. 2019, arXiv:1907.05242.
    """

    def __init__(
        self,
        config: PKMConfig,
        model_dim: int,
        *,
        out_dim: int | None = None,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.dtype = dtype
        heads, half = config.num_heads, config.key_dim // 2
        bound = config.key_dim**-0.5
        shape = (heads, 2, config.num_subkeys, half)
        self.keys = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))
        table = jax.random.normal(rngs.params(), (config.num_subkeys**2, config.value_dim))
        self.values = nnx.Param(table * config.value_dim**-0.5)
        # The norm multiplies by its weight directly, unlike the decoder's.
        self.query_scale = (
            nnx.Param(jnp.ones((heads * config.key_dim,))) if config.query_norm else None
        )
        xavier = nnx.initializers.xavier_uniform()
        self.query_proj = nnx.Linear(
            model_dim, heads * config.key_dim, dtype=dtype, kernel_init=xavier, rngs=rngs
        )
        init = nnx.initializers.normal(model_dim**-0.5)

        def linear(features_in: int, features_out: int) -> nnx.Linear:
            return nnx.Linear(features_in, features_out, dtype=dtype, kernel_init=init, rngs=rngs)

        self.gate_proj = linear(model_dim, config.value_dim) if config.gated else None
        self.out_proj = linear(config.value_dim, model_dim if out_dim is None else out_dim)

    def __call__(
        self, x: Float[Array, "batch length model"], *, partition: Partition | None = None
    ) -> tuple[Float[Array, "batch length out"], Int[Array, "batch length places"]]:
        """The layer's output and the slots read, heads joined.

        Args:
          x: `[batch, length, model]`.
          partition: of the work and the value table over devices.
        """
        config = self.config
        batch, length = x.shape[:2]
        memory_dtype = jnp.promote_types(x.dtype, jnp.float32)
        query = self.query_proj(x).astype(memory_dtype)
        if self.query_scale is not None:
            mean_square = jnp.mean(query**2, axis=-1, keepdims=True)
            query = query * jax.lax.rsqrt(mean_square + 1e-6) * self.query_scale[...][None, None]
        query = query.reshape(batch, length, config.num_heads, config.key_dim)
        if partition is None:
            read, slot_ids = self._look_up(query, self.keys[...], self.values[...], MemoryAxes())
        else:
            axes = partition.memory_axes(learned=True)
            by_token = P(BATCH)
            read, slot_ids = partition.run(
                lambda query, keys, values: self._look_up(query, keys, values, axes),
                in_specs=(by_token, P(), P(*partition.table_spec(learned=True))),
                out_specs=(P(BATCH, None, axes.target_columns), by_token),
            )(query, self.keys[...], self.values[...])
            read = partition.by_sequence(read)
        read = read.astype(x.dtype)
        if self.gate_proj is not None:
            read = read * jax.nn.silu(self.gate_proj(x))
        return self.out_proj(read), slot_ids

    def _look_up(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, axes: MemoryAxes
    ) -> tuple[jax.Array, jax.Array]:
        """Reads `[batch, length, value]` and their slots, of a table that devices may share.

        Each device finds its own tokens' slots, then reads its part of the table for all tokens.
        """
        config = self.config
        batch, length = query.shape[:2]
        address, weights = product_top_k(
            query.reshape(batch * length, *query.shape[2:]),
            keys,
            top_k=config.top_k,
            score="dot",
            normalization="head",
            backend=config.backend,
        )
        slot_ids = address.slot_ids.reshape(1, batch, length, -1)
        weights = weights.reshape(slot_ids.shape)
        ids, weights = gather_tokens(slot_ids, axes), gather_tokens(weights, axes)
        if axes.slots:
            own = own_slots(ids, values.shape[0], axes)
            ids, weights = own.slot_ids, jnp.where(own.held, weights, 0.0)
        read = slot_read(
            values,
            ids.reshape(-1, ids.shape[-1]),
            weights.reshape(-1, ids.shape[-1]),
            backend=config.backend,
        ).output
        read = read.reshape(*ids.shape[:3], -1)
        if axes.slots:
            read = own_tokens(jax.lax.psum(read, axes.slots), batch, axes)
        else:
            read = columns_for_tokens(read, axes)
        return read[0], slot_ids[0]
