"""How the layers' work is laid out over a mesh of devices.

Arrays keep their whole shapes: the compiler splits projections, norms and sums by the constraints
set here. Operations that it cannot split, or would split badly (gathers, sorts, kernels), run in
`Partition.run` on each device's own part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.core.chunks import merge_groups, split_groups
from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.slots.options.devices import MemoryAxes
from fwpkm_jax.literals import Checked, Count
from fwpkm_jax.rules.base import AbstractRule

MemoryLayout = Literal["independent", "columns", "slots"]

BATCH = ("data", "fsdp")
"""Mesh axes over which sequences are split."""
HEADS = "model"
"""Mesh axis over which heads and hidden units are split."""
SEQUENCE = "sequence"
"""Mesh axis over which the tokens of each sequence are split; a mesh need not have it."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Checked):
    """How many devices share the work, and how. Results change only by rounding."""

    data: Count = 1
    """Parts of the batch with a copy of the slow weights each; they never share fast-weight
    memories."""
    fsdp: Count = 1
    """Parts of each of these; they share one copy of the slow weights and the optimiser's state."""
    model: Count = 1
    """Parts of the heads, of the MLPs' hidden units and of the value tables' columns."""
    sequence: Count = 1
    """Parts of each sequence, for contexts that do not fit one device."""
    memory: MemoryLayout = "independent"
    """Where a fast-weight memory is stored. independent: with one part of the batch. columns,
    slots: on all devices of a part along `data`, each of which holds some columns, or some slots,
    of the value table; slots is for tables larger than a device."""

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.model * self.sequence


@dataclass(frozen=True)
class Partition(Checked):
    """A mesh with the axes `data`, `fsdp`, `model`, perhaps `sequence`, and where memories lie.

    Layers and models get None on one device; a branch shows what several devices do differently.
    A partition object for one device would not shorten that code. Where the work differs (overlays,
    which work without a mesh only; norms in one kernel with the sum; shared tables; gathered
    weights; parts of sequences) a branch would still be needed. Elsewhere a pass on one device
    would call `run`, `by_sequence`, `split_groups` and `merge_groups` without an effect. A mesh of
    one device runs the code for several; its results may differ by rounding.
    """

    mesh: Mesh | AbstractMesh
    memory: MemoryLayout = "independent"

    def sharding(self, *axes: Any) -> NamedSharding:
        """The layout of an array whose dimensions are split along these mesh axes."""
        return NamedSharding(self.mesh, P(*axes))

    def constrain(self, x: jax.Array, *axes: Any) -> jax.Array:
        """`x` with its dimensions split along these mesh axes; further dimensions are not split."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    @property
    def sequence(self) -> SequenceAxis | None:
        """The axis over which sequences are split; None: devices have whole sequences."""
        size = self.size(SEQUENCE)
        return SequenceAxis(SEQUENCE, size) if size > 1 else None

    def tokens(self, *axes: Any, also: tuple[str, ...] = ()) -> P:
        """The spec of an array `[batch, length, ...]`.

        Args:
          axes: mesh axes of the dimensions after the length.
          also: mesh axes that split the tokens beside `sequence`.
        """
        along = (*self.used(SEQUENCE), *also)
        return P(BATCH, along or None, *axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the tokens of a batch."""
        return (*BATCH, *self.used(SEQUENCE))

    def by_sequence(self, x: jax.Array) -> jax.Array:
        """`x [batch, length, ...]`, split by sequences, and by tokens along the axis `sequence`."""
        return self.constrain(x, *self.tokens())

    def interleave(self, x: jax.Array, groups: int) -> jax.Array:
        """`x [batch, ...]` in the order in which `split_groups` takes sequences.

        Devices that share several memories get an equal part of each one's sequences.
        """
        x = _swap(x, *self._grid(groups))
        return self.constrain(x, BATCH)

    def split_groups(self, x: jax.Array, groups: int) -> jax.Array:
        """From `interleave` to `[groups, batch // groups, ...]`, without communication."""
        parts, memories, devices = self._grid(groups)
        return split_groups(_swap(x, parts, devices, memories), groups)

    def merge_groups(self, x: jax.Array) -> jax.Array:
        """The inverse of `split_groups` of tokens `[..., length, ...]`, without communication."""
        return self.by_sequence(_swap(merge_groups(x), *self._grid(x.shape[0])))

    def _grid(self, groups: int) -> tuple[int, int, int]:
        """Parts of the batch, memories of each, devices that share them."""
        parts = self.size("data")
        if self.memory == "independent" or groups <= parts:
            return 1, 1, 1  # A device's sequences are neighbours as they come.
        return parts, groups // parts, self.size("fsdp")

    def run(self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
        """`function` on each device's part of the arguments; see `jax.shard_map`."""
        # Kernels and loop carries do not declare along which axes they vary.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def size(self, *axes: str) -> int:
        """Devices along these axes together."""
        # An axis that the mesh does not have counts as one device.
        size = 1
        for axis in axes:
            size *= self.mesh.shape.get(axis, 1)
        return size

    def check_divides(self, name: str, number: int, *axes: str) -> None:
        """Raises ValueError unless `number`, called `name`, divides into parts along these axes."""
        if number % self.size(*axes):
            sizes = " x ".join(f"mesh.{axis}={self.size(axis)}" for axis in axes)
            raise ValueError(
                f"{name}={number} does not divide into {sizes} parts; make it a multiple, or the "
                "mesh smaller there."
            )

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Mesh axes along which devices hold different memories."""
        return BATCH if self.memory == "independent" else ("data",)

    def memory_axes(self, *, learned: bool = False) -> MemoryAxes:
        """How devices share a value table.

        Args:
          learned: for the value table of slow weights, which the whole batch shares.
        """
        layout = "columns" if learned and self.memory == "independent" else self.memory
        # Devices along fsdp hold other sequences of the same memories.
        tokens = () if layout == "independent" else self.used("fsdp")
        if not learned:  # Devices with parts of the same sequences write the same memory.
            tokens = (*tokens, *self.used(SEQUENCE))
        parts = (*self.used(HEADS), *tokens)
        if layout == "slots":
            return MemoryAxes(tokens=tokens, slots=parts)
        return MemoryAxes(tokens=tokens, columns=parts)

    def check_groups(self, groups: int, members: int) -> None:
        """Raises ValueError unless memories of `members` sequences each can be laid out."""
        parts = self.size(*self.group_axes)
        if groups % parts and self.memory == "independent":
            raise ValueError(
                f"training.memory.groups={groups} does not divide into "
                f"mesh.data={self.size('data')} x mesh.fsdp={self.size('fsdp')} independent "
                "memories. Choose a multiple, or let "
                f"devices share each memory: mesh.memory=columns with a divisor of {groups} as "
                "mesh.data and the other devices along mesh.fsdp."
            )
        if groups % parts:
            raise ValueError(
                f"training.memory.groups={groups} does not divide into mesh.data={parts} parts, "
                f"and with mesh.memory={self.memory} no memory is shared between them; make "
                f"mesh.data a divisor of {groups} and put the other devices along mesh.fsdp."
            )
        # Devices along fsdp share a memory, so each takes an equal part of its sequences.
        if self.memory != "independent":
            self.check_divides("Sequences per memory", members, "fsdp")

    def axes_of(self, rule: AbstractRule) -> MemoryAxes | None:
        """How devices share each memory of a rule; None: every device has its own, whole.

        Raises:
          ValueError: the rule's memory cannot be shared by devices as this mesh asks.
        """
        if rule.supports_sharding:
            return self.memory_axes()
        if self.memory != "independent":
            raise ValueError(
                f"mesh.memory={self.memory!r} splits a value table that is written row by row, "
                f"which {rule} is not; use mesh.memory=independent."
            )
        return None

    def memory_specs(self, rule: AbstractRule, memory: Any) -> Any:
        """Specs of a memory's arrays, leaves `[groups, ...]`; see `AbstractRule.memory_specs`."""
        axes = self.axes_of(rule)
        return rule.memory_specs(memory, group_axes=self.group_axes, axes=axes)

    def used(self, *axes: str) -> tuple[str, ...]:
        """Those of these mesh axes along which there is more than one device."""
        return tuple(axis for axis in axes if self.size(axis) > 1)


def _swap(x: jax.Array, parts: int, outer: int, inner: int) -> jax.Array:
    """`x [parts * outer * inner * rest, ...]` with the axes `outer` and `inner` exchanged."""
    grid = x.reshape(parts, outer, inner, -1, *x.shape[1:])
    return grid.swapaxes(1, 2).reshape(x.shape)
