"""The contract of a token mixer: what decoder, mesh, streams and evaluations need from it.

A mixer is two classes in one file. Its configuration, a frozen dataclass below
`AbstractMixerConfig`, says how to build it and answers questions that need no parameters. The
module, below `AbstractMixer`, mixes the tokens of each sequence. A name for it is one call of
`layers.mixers.register_mixer`; `ModelConfig.mixers` takes names and configurations alike.

Required are `AbstractMixerConfig.build`, `AbstractMixer.init_cache` and `AbstractMixer.mix`. A
parameter that the mixer creates itself says what it is (`layers.parameters`). Everything else has a
default:

| what | default |
|---|---|
| `AbstractMixerConfig.label` | the class's name |
| `AbstractMixerConfig.split_numbers` | heads are not split over devices |
| `AbstractMixerConfig.receptive_field` | every earlier token |
| `AbstractMixerConfig.in_window` | no attention that a training step could limit |
| `AbstractMixerConfig.mixer_memory` | no fast weights written in chunks of the mixer's own |
| `AbstractMixer.output_map` | no linear map of its own into the residual stream |
| `AbstractMixer.mix_over_devices` | each device runs `mix` on its sequences or its shards of them |
| `AbstractMixer.capacity` | the cache's size does not depend on the stream's length |
| `starts`, an argument of `mix` | rows that hold several documents are refused |
| `axis`, an argument of `mix` | devices with shards of a sequence pass the cache on, in turn |
"""

import abc
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from fwpkm_jax.core.array_types import TokenMask
from fwpkm_jax.core.checks import check_arrays
from fwpkm_jax.core.documents import pack_starts, starts_at_real
from fwpkm_jax.core.padding import pack, pack_tokens, unpack
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.sequential import sequential_pass
from fwpkm_jax.layers.partition import BATCH, SEQUENCE, Partition

Mask = TokenMask | None
"""1 for real tokens, 0 for padding; None: all are real."""

Starts = Bool[Array, "batch length"] | None
"""True at the first token of each document; None: a sequence is one document."""


class ReadBefore(NamedTuple):
    """Tokens that a mixer has read before the first token of every document.

    Attributes:
      cache: the mixer's own after these tokens, leaves `[batch, ...]`.
      number: of these tokens.
    """

    cache: Any
    number: int


class MixerMemory(NamedTuple):
    """Fast weights that a mixer writes in chunks of its own and starts anew for each sequence.

    Attributes:
      name: of the memory, for messages.
      chunk_size: tokens between two writes.
    """

    name: str
    chunk_size: int


@dataclass(frozen=True, kw_only=True)
class AbstractMixerConfig(abc.ABC):
    """The configuration of a token mixer: hashable, and written to a run's `config.json`."""

    registry: ClassVar[str] = "fwpkm_jax.layers.mixers.registry"
    """The module whose `load_all` imports every mixer of this package."""

    @abc.abstractmethod
    def build(
        self,
        model_dim: int,
        *,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ) -> "AbstractMixer":
        """Builds the mixer with new parameters, which are float32.

        Args:
          model_dim: width of its input and output.
          norm_eps: added to the mean square in RMS norms.
          init_std: standard deviation of initial weights.
          dtype: of activations; None: the input's.
          rngs: for the initial weights, from the stream `params`.

        Raises:
          ValueError: the configuration does not fit `model_dim`.
        """

    @property
    def label(self) -> str:
        """What a report calls the mixer."""
        return type(self).__name__.removesuffix("Config")

    @property
    def split_numbers(self) -> Mapping[str, int]:
        """Numbers, by the names of their fields, that `mesh.model` must divide."""
        return {}

    @property
    def receptive_field(self) -> int | None:
        """How many tokens an output can depend on, its own included; None: all before it."""
        return None

    def in_window(self, window: int) -> "AbstractMixerConfig | None":
        """The same mixer with the same parameters, whose full attention sees `window` tokens.

        None for a mixer that has no full attention. Training may impose the window on a share of
        its steps (`training.window_probability`).
        """
        return None

    @property
    def mixer_memory(self) -> MixerMemory | None:
        """The mixer's own chunk-wise memory, which evaluations cannot write or carry on."""
        return None


class AbstractMixer(nnx.Module):
    """Mixes the tokens of each sequence; the block adds the result to the residual stream.

    No output depends on a later token, on another sequence of the batch, or on another document of
    its row. Padding has no effect: other outputs and the cache are the same without it, and the
    outputs at padding are 0.

    A mixer whose `mix` has an argument `starts` takes rows of several documents. Each document
    gives the same outputs as in a row of its own.
    """

    context_parallel: ClassVar[bool] = True
    """Whether several devices may hold a shard of each sequence (`mesh.sequence`)."""

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        starts: jax.Array | None = None,
        cache: Any = None,
        partition: Partition | None = None,
    ) -> tuple[Float[Array, "batch length model"], Any]:
        """The mixer's output without the residual, and the cache to continue from.

        Subclasses define `mix`, and `mix_over_devices` where they can split more than sequences.

        Args:
          x: `[batch, length, model]`, at least one token.
          mask: `[batch, length]`, 0 at padding, which takes no position, is seen by no token and
            yields zeros.
          starts: bool `[batch, length]`, true at the first token of each document, from
            `core.documents.document_starts(segment_ids)`; None: a sequence is one document. With a
            cache, the tokens before the first start go on with the cache's document.
          cache: of the tokens before, from `init_cache` or the last call; None for a whole
            sequence. A sequence in pieces of any size gives the same outputs.
          partition: of a whole sequence's work over devices, without cache; where it splits
            sequences, with or without cache.

        Returns:
          The output, `[batch, length, model]`, and the new cache, None if none was given.

        Raises:
          ValueError: `x`, `mask` or `starts` has another shape or dtype, `partition` comes with a
            cache and whole sequences, `starts` is given to a mixer that does not take it, or the
            mixer takes no shards of sequences.
        """
        output = self.output_map
        check_arrays(
            x=(x, "float batch length model"),
            mask=(mask, "mask batch length"),
            starts=(starts, "mask batch length"),
            sizes={} if output is None else {"model": output.out_features},
        )
        # Passed on only where it is given: a mixer of others may not know the argument.
        documents = {} if starts is None else {"starts": self._checked_starts(starts)}
        if partition is None:
            return self.mix(x, mask=mask, cache=cache, **documents)
        return self._over_devices(x, partition, cache, mask=mask, **documents)

    def _over_devices(
        self, x: jax.Array, partition: Partition, cache: Any, *, mask: Mask, starts: Starts = None
    ) -> tuple[jax.Array, Any]:
        """`__call__` over several devices: checks, and without an effect of what is at padding."""
        if partition.sequence is not None:
            if not self.context_parallel:
                raise ValueError(
                    f"mesh.sequence={partition.size(SEQUENCE)}: {type(self).__name__} takes no "
                    "shards of sequences; set mesh.sequence=1, or use other layers."
                )
            partition.check_divides("The length of a sequence", x.shape[1], SEQUENCE)
        elif cache is not None:
            raise ValueError(
                "partition goes with whole sequences; leave out the cache, or pass partition=None."
            )
        if mask is None:
            return self.mix_over_devices(x, partition, starts=starts, cache=cache)
        if partition.sequence is not None:
            # A start at padding would be lost with it; the next real token takes it over.
            starts = None if starts is None else starts_at_real(starts, mask)
            real = mask.astype(bool)[:, :, None]
            # NaN at padding would spread through sums that a weight of 0 does not stop.
            x = jnp.where(real, x, 0)
            given = {"mask": mask, "starts": starts, "cache": cache}
            y, cache = self.mix_over_devices(x, partition, **given)
            return jnp.where(real, y, 0), cache
        # Padding goes behind all real tokens, none of which can see it; each device moves tokens of
        # its own sequences.
        rows = {"in_specs": P(BATCH), "out_specs": P(BATCH)}
        packing = partition.run(pack_tokens, **rows)(mask)
        x = partition.run(pack, **rows)(x, packing)
        if starts is not None:
            starts = partition.run(pack_starts, **rows)(starts, packing)
        y, _ = self.mix_over_devices(x, partition, starts=starts)
        return partition.run(unpack, **rows)(partition.by_sequence(y), packing), None

    @property
    def takes_documents(self) -> bool:
        """Whether rows may hold several documents; by default, if `mix` takes `starts`."""
        return self._mix_takes("starts")

    def _mix_takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.mix).parameters

    def _checked_starts(self, starts: jax.Array) -> jax.Array:
        if not self.takes_documents:
            raise ValueError(
                f"{type(self).__name__} takes no rows of several documents (starts, segment_ids); "
                "put one document into each row, or choose another mixer."
            )
        return starts.astype(bool)

    @abc.abstractmethod
    def mix(
        self, x: Float[Array, "batch length model"], *, mask: Mask = None, cache: Any = None
    ) -> tuple[Float[Array, "batch length model"], Any]:
        """`__call__` on one device.

        With an argument `starts` it takes rows of several documents. With an argument `axis` it
        computes this device's shard of each sequence while other devices compute theirs, inside
        `jax.shard_map`: `mask` and `starts` are the shard's (no document starts at padding, where
        the output may be anything), `cache` is that before the whole sequence, equal on all
        devices, and so is the cache after it that every device returns.
        """

    @abc.abstractmethod
    def init_cache(self, batch: int, *, max_length: int, dtype: DTypeLike) -> Any:
        """The cache before a stream's first token, a pytree whose leaves are `[batch, ...]`.

        Args:
          batch: sequences.
          max_length: tokens to keep, for a mixer that keeps all; others ignore it.
          dtype: of the activations.
        """

    def mix_over_devices(
        self,
        x: Float[Array, "batch length model"],
        partition: Partition,
        *,
        mask: Mask = None,
        starts: Starts = None,
        cache: Any = None,
    ) -> tuple[Float[Array, "batch length model"], Any]:
        """`mix` over several devices; here each computes its own sequences, or shards of them.

        Args:
          x: `[batch, length, model]`, laid out by `Partition.by_sequence`.
          partition: the devices.
          mask: 0 at padding, where the output may be anything; passed only if there is padding and
            devices hold shards of sequences.
          starts: first tokens of documents, none of them at padding.
          cache: of the tokens before; None for whole sequences.
        """
        tokens = partition.tokens()
        return partition.run(
            lambda mixer, x, cache, given: mixer.mix_shard(
                x, axis=partition.sequence, cache=cache, **given
            ),
            in_specs=(P(), tokens, P(BATCH), tokens),
            out_specs=(tokens, P(BATCH)),
        )(self, x, cache, {"mask": mask, "starts": starts})

    def mix_shard(
        self,
        x: Float[Array, "batch length model"],
        *,
        axis: SequenceAxis | None = None,
        cache: Any = None,
        **given: Any,
    ) -> tuple[Float[Array, "batch length model"], Any]:
        """`mix` with the arguments that are not None; in turn if it does not take the `axis`.

        In turn, devices wait for the cache of the device before, see
        `core.sequence.sequential.sequential_pass`. That is right for every mixer whose streams
        equal whole sequences.

        Args:
          x: this device's tokens, as many as the others'.
          axis: over which the sequence lies; None: this device has the whole sequence.
          cache: of the tokens before the whole sequence, equal on all devices.
          given: further arguments of `mix`.

        Returns:
          This shard's output, and on every device the cache after the last one, None if none was
          given.
        """
        # A mixer of another package need not know of shards.
        if axis is not None and not self._mix_takes("axis"):
            return self.mix_in_turn(x, axis=axis, cache=cache, **given)
        given |= {"axis": axis}
        return self.mix(x, cache=cache, **{name: y for name, y in given.items() if y is not None})

    def mix_in_turn(
        self, x: jax.Array, *, axis: SequenceAxis, cache: Any, **given: Any
    ) -> tuple[jax.Array, Any]:
        """`mix_shard` of a device that waits for the cache of the device before."""
        before = cache
        if before is None:
            length = axis.size * x.shape[1]
            before = self.init_cache(x.shape[0], max_length=length, dtype=x.dtype)

        def mix(cache: Any, inputs: dict[str, Any]) -> tuple[jax.Array, Any]:
            return self.mix_shard(**inputs, cache=cache)

        inputs = {"x": x} | given
        # The states go round first; then every device computes its outputs at the same time.
        before = sequential_pass(lambda *of: mix(*of)[1], before, inputs, axis=axis)
        output, end = mix(before, inputs)
        return output, None if cache is None else axis.from_last(end)

    @property
    def output_map(self) -> nnx.Linear | None:
        """The linear map that writes into the residual stream, for `branch_init_scale`."""
        return None

    def capacity(self, cache: Any) -> int | None:
        """The `max_length` that made this cache; None if its size does not depend on it."""
        return None

    def grow_cache(self, cache: Any, max_length: int) -> Any:
        """The cache with room for `max_length` tokens, at least its `capacity`."""
        if self.capacity(cache) is None:
            return cache
        raise ValueError(
            f"The cache of {type(self).__name__} keeps {self.capacity(cache)} tokens and cannot "
            f"grow to {max_length}; start with a larger max_length, or define grow_cache."
        )

    def reset_cache(self, cache: Any) -> Any:
        """The cache before the first token, of the same size and dtypes as `cache`."""
        # A mixer without a state has an empty cache, which needs no batch size.
        leaves = jax.tree.leaves(cache)
        if not leaves:
            return cache
        capacity = self.capacity(cache)
        start = self.init_cache(
            leaves[0].shape[0],
            max_length=1 if capacity is None else capacity,
            dtype=leaves[0].dtype,
        )
        return jax.tree.map(lambda new, old: _of_same_size(type(self), new, old), start, cache)


def _of_same_size(mixer: type, new: jax.Array, old: jax.Array) -> jax.Array:
    if new.shape != old.shape:
        raise ValueError(
            f"init_cache of {mixer.__name__} makes a leaf {new.shape} where the cache has "
            f"{old.shape}; a cache that grows with max_length needs {mixer.__name__}.capacity."
        )
    return new.astype(old.dtype)
