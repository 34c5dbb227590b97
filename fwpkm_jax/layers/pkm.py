"""Product-key memory: a large table of slots, trained by the slow optimiser, in place of an MLP."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays, check_rngs
from fwpkm_jax.core.slots.options.devices import (
    MemoryAxes,
    columns_for_tokens,
    gather_tokens,
    own_slots,
    own_tokens,
)
from fwpkm_jax.layers.parameters import declare, linear_map, parameter
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.literals import Count, check_fields
from pallas_kernels.dispatch import Backend
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.slot_read import slot_read


@dataclass(frozen=True, kw_only=True)
class PKMConfig:
    """A product-key memory layer."""

    num_subkeys: int = 512
    """Sub-keys per codebook; the memory has num_subkeys**2 slots."""
    key_dim: int = 512
    """Width of a head's query, both halves together; even."""
    value_dim: Count = 512
    """Width of a slot's value."""
    num_heads: Count = 4
    """Queries per token; their reads are summed from one value table."""
    top_k: int = 32
    """Slots read per head."""
    query_norm: bool = True
    """RMS norm over the queries of all heads together."""
    query_batch_norm: bool = False
    """Batch norm of the queries instead, as in the original paper: each feature over the tokens of
    the batch; needs query_norm=False. Evaluations use running statistics, so that a token's output
    does not depend on other tokens."""
    gated: bool = True
    """Multiplies the read by SiLU of a projection of the input."""
    backend: Backend = "auto"
    """What selects and reads the slots: the device's kernels where they run (auto), plain JAX
    (reference), or pallas."""

    def __post_init__(self):
        check_fields(self)
        if self.key_dim < 2 or self.key_dim % 2:
            raise ValueError(f"key_dim={self.key_dim} must be even (two codebooks).")
        if not 1 <= self.top_k <= self.num_subkeys:
            raise ValueError(
                f"top_k={self.top_k} must lie between 1 and num_subkeys={self.num_subkeys}."
            )
        if self.query_norm and self.query_batch_norm:
            raise ValueError(
                "query_norm=True and query_batch_norm=True: the queries have one norm; turn one of "
                "them off."
            )


class QueryStatistics(NamedTuple):
    """Mean and variance of each feature of the queries, over the tokens of a batch.

    Attributes:
      mean: `[features]`, heads joined.
      variance: `[features]`, unbiased.
    """

    mean: Float[Array, " features"]
    variance: Float[Array, " features"]


class PKMOutput(NamedTuple):
    """What the layer returns.

    Attributes:
      output: `[batch, length, out]`.
      slot_ids: slots read, heads joined.
      statistics: of this batch's queries, if the layer normed the queries by them, else None.
    """

    output: Float[Array, "batch length out"]
    slot_ids: Int[Array, "batch length places"]
    statistics: QueryStatistics | None


class PKM(nnx.Module):
    """Reads slots by dot-product addressing, one softmax per head.

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
        check_rngs(rngs)
        self.config = config
        self.dtype = dtype
        heads, half = config.num_heads, config.key_dim // 2
        bound = config.key_dim**-0.5
        shape = (heads, 2, config.num_subkeys, half)
        keys = jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
        self.keys = parameter(keys, "embedding")
        # Normal with the inverse root of the width, as in the authors' code.
        table = jax.random.normal(rngs.params(), (config.num_subkeys**2, config.value_dim))
        self.values = parameter(table * config.value_dim**-0.5, "embedding", ("slots", "columns"))
        # These norms multiply by their weight directly; the decoder's norms multiply by 1 + weight.
        features = (heads * config.key_dim,)
        normed = config.query_norm or config.query_batch_norm
        self.query_scale = parameter(jnp.ones(features), "norm_scale") if normed else None
        self.query_shift = (
            parameter(jnp.zeros(features), "bias") if config.query_batch_norm else None
        )

        # Running statistics: they have no gradient; `with_statistics` updates them.
        def statistic(value: jax.Array) -> nnx.BatchStat | None:
            wanted = config.query_batch_norm
            return nnx.BatchStat(value, **declare("statistic")) if wanted else None

        self.query_mean = statistic(jnp.zeros(features))
        self.query_variance = statistic(jnp.ones(features))
        options: dict[str, Any] = {"init_std": model_dim**-0.5, "use_bias": True, "dtype": dtype}
        linear = functools.partial(linear_map, **options, rngs=rngs)
        xavier = nnx.initializers.xavier_uniform()
        self.query_proj = linear(model_dim, heads * config.key_dim, kernel_init=xavier)
        values, out_dim = config.value_dim, model_dim if out_dim is None else out_dim
        self.gate_proj = linear(model_dim, values, "embed", "mlp") if config.gated else None
        self.out_proj = linear(values, out_dim, "mlp", "embed")

    def __call__(
        self,
        x: Float[Array, "batch length model"],
        *,
        mask: TokenMask | None = None,
        partition: Partition | None = None,
        batch_statistics: bool = False,
    ) -> PKMOutput:
        """The layer's output, the slots read, and with `batch_statistics` those of the queries.

        Args:
          x: `[batch, length, model]`.
          mask: 1 for tokens that count in a batch's statistics; None: all do.
          partition: of the work and the value table over devices.
          batch_statistics: a batch norm takes this batch's statistics, as in training, rather than
            the running ones.
        """
        config = self.config
        check_arrays(
            x=(x, "float batch length model"),
            mask=(mask, "mask batch length"),
            sizes={"model": self.query_proj.in_features},
        )
        batch, length = x.shape[:2]
        # Scores near each other would tie in bfloat16 and choose other slots.
        memory_dtype = jnp.promote_types(x.dtype, jnp.float32)
        query = self.query_proj(x).astype(memory_dtype)
        statistics = None
        if config.query_batch_norm:
            query, statistics = self._batch_norm(query, batch_statistics, mask)
        elif self.query_scale is not None:
            # Over all heads together, as the scale lies.
            mean_square = jnp.mean(query**2, axis=-1, keepdims=True)
            query = query * jax.lax.rsqrt(mean_square + 1e-6) * self.query_scale[...][None, None]
        query = query.reshape(batch, length, config.num_heads, config.key_dim)
        if partition is None:
            read, slot_ids = self._look_up(query, self.keys[...], self.values[...], MemoryAxes())
        else:
            axes = partition.memory_axes(learned=True)
            by_token = partition.tokens()
            read, slot_ids = partition.run(
                lambda query, keys, values: self._look_up(query, keys, values, axes),
                in_specs=(by_token, P(), P(axes.slots, axes.columns)),
                out_specs=(partition.tokens(axes.target_columns), by_token),
            )(query, self.keys[...], self.values[...])
            read = partition.by_sequence(read)
        read = read.astype(x.dtype)
        if self.gate_proj is not None:
            read = read * jax.nn.silu(self.gate_proj(x))
        return PKMOutput(self.out_proj(read), slot_ids, statistics)

    def _batch_norm(
        self,
        query: Float[Array, "batch length features"],
        batch_statistics: bool,
        mask: jax.Array | None,
    ) -> tuple[Float[Array, "batch length features"], QueryStatistics | None]:
        statistics = None
        if batch_statistics:
            counted = None if mask is None else jnp.expand_dims(mask != 0, 2)
            mean = jnp.mean(query, axis=(0, 1), where=counted)
            variance = jnp.var(query, axis=(0, 1), where=counted)
            tokens: Any = query.shape[0] * query.shape[1]
            if counted is not None:
                tokens = jnp.sum(counted)
            # As torch's running variance, which released weights hold.
            unbiased = variance * (tokens / jnp.maximum(tokens - 1, 1))
            statistics = jax.lax.stop_gradient(QueryStatistics(mean, unbiased))
        else:
            assert self.query_mean is not None
            assert self.query_variance is not None
            mean, variance = self.query_mean[...], self.query_variance[...]
        assert self.query_scale is not None
        assert self.query_shift is not None
        # torch adds 1e-5 here; released weights expect it.
        query = (query - mean[None, None]) * jax.lax.rsqrt(variance + 1e-5)[None, None]
        query = query * self.query_scale[...][None, None] + self.query_shift[...][None, None]
        return query, statistics

    def _look_up(
        self, query: jax.Array, keys: jax.Array, values: jax.Array, axes: MemoryAxes
    ) -> tuple[jax.Array, jax.Array]:
        """Reads `[batch, length, value]` and their slots, of a table that devices may share.

        Each device finds its own tokens' slots, then reads its part of the table for all tokens.
        """
        config = self.config
        batch, length = query.shape[:2]
        address, weights = select_slots(
            query.reshape(batch * length, *query.shape[2:]),
            keys,
            top_k=config.top_k,
            score="dot",
            normalization="head",
            backend=config.backend,
        )
        # The axis in front is that of groups, which a learned table does not have.
        slot_ids = address.slot_ids.reshape(1, batch, length, -1)
        weights = weights.reshape(slot_ids.shape)
        # Devices that share a table need the reads of all tokens, not only of their own.
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
            # Each device read only its slots; the sum over devices is the whole read.
            read = own_tokens(jax.lax.psum(read, axes.slots), batch, axes)
        else:
            read = columns_for_tokens(read, axes)
        return read[0], slot_ids[0]
