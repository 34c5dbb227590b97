"""The chunk and the arguments that LaCT and Titans share: step sizes come from the data."""

from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Float

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.chunks import ChunkSizeTag
from fwpkm_jax.core.targets import Pairing, write_weights
from fwpkm_jax.rules.base import AbstractRule


class GradientChunk(NamedTuple):
    """A `core.chunks.Chunk` with the data-dependent part of the steps.

    Attributes:
      query, target, write_weight, paired, counted, cut: see `core.chunks.Chunk`.
      key: `[tokens, 1, key]`, what tokens are written under; None: under their queries.
      rates: `[tokens, num_rates]`, step sizes; None: the rule's `learning_rate`.
      momentum: `[tokens]`, share of the last step kept, averaged over a write; None: the rule's.
    """

    query: jax.Array
    target: jax.Array
    write_weight: jax.Array
    paired: jax.Array
    counted: jax.Array
    key: jax.Array | None = None
    rates: jax.Array | None = None
    momentum: jax.Array | None = None
    cut: ChunkSizeTag | None = None


class AbstractGradientRule(AbstractRule):
    """A rule that takes each token's step size, and the share of the last step to keep."""

    num_rates: ClassVar[int] = 1
    """Step sizes of a token."""

    def chunk(self, query: jax.Array, target: jax.Array, weights: Any) -> GradientChunk:
        return GradientChunk(query, target, *weights)

    def sequence(
        self,
        query: Float[Array, "batch length heads key"],
        value: Float[Array, "batch length value"],
        *,
        gate: Float[Array, "batch length"] | None = None,
        mask: TokenMask | None = None,
        chunk_size: int,
        pairing: Pairing = write_weights,
        key: Float[Array, "batch length heads key"] | None = None,
        rates: Float[Array, "batch length num_rates"] | None = None,
        momentum: Float[Array, "batch length"] | None = None,
    ) -> GradientChunk:
        """See `AbstractRule.sequence`; `key`, `rates` and `momentum` as in `GradientChunk`."""
        sequence = super().sequence(
            query, value, gate=gate, mask=mask, chunk_size=chunk_size, pairing=pairing
        )
        check_arrays(
            query=(query, "float batch length heads key"),
            key=(key, "float batch length heads key"),
            rates=(rates, "float batch length tensors"),
            momentum=(momentum, "float batch length"),
            sizes={"tensors": self.num_rates},
        )
        return sequence._replace(key=key, rates=rates, momentum=momentum)
