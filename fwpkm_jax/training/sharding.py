"""A run over several devices: the mesh, and the layout of the state's arrays and the batches."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fwpkm_jax.layers.partition import BATCH, HEADS, SEQUENCE, MeshConfig, Partition
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.sharding import parameter_shardings, path_name
from fwpkm_jax.rules.base import AbstractRule
from fwpkm_jax.training.state import Memories, TrainState, named_leaves
from fwpkm_jax.training.training_config import TrainingConfig


def make_partition(config: MeshConfig, devices: Sequence[Any] | None = None) -> Partition | None:
    """The mesh that a run asks for, or None if it uses only the first device.

    Args:
      config: sizes of the mesh's axes, and how memories are laid out.
      devices: devices of the mesh, all of which are used; None: those of this run's processes.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    if config.num_devices == 1 and (devices is not None or jax.process_count() == 1):
        return None
    devices = jax.devices() if devices is None else devices
    if len(devices) != config.num_devices:
        shape, names, _ = _shape(config)
        count = jax.process_count()
        among = f" in {count} processes" if count > 1 else ""
        sizes = " x ".join(f"mesh.{n}={s}" for n, s in zip(names, shape, strict=True))
        raise ValueError(
            f"{sizes} is a mesh of {config.num_devices} devices, but there are {len(devices)} "
            f"({devices[0].platform}){among}; make the product {len(devices)}, or 1 for "
            "one device of one process."
        )
    return Partition(jax.make_mesh(*_shape(config), devices=devices), config.memory)


def check_mesh(
    mesh: MeshConfig, *, model: ModelConfig, training: TrainingConfig, length: int
) -> None:
    """Raises ValueError if batches, memories or heads do not divide into the mesh's parts."""
    if mesh.num_devices == 1:
        return
    parts = mesh.data * mesh.fsdp
    sequences = training.batch_size // training.micro_batches
    if sequences % parts:
        raise ValueError(
            f"training.batch_size={training.batch_size} in {training.micro_batches} micro-batches "
            f"gives {sequences} sequences at a time, which do not divide into mesh.data="
            f"{mesh.data} x mesh.fsdp={mesh.fsdp} parts; make batch_size / micro_batches a "
            f"multiple of {parts}."
        )
    if length % (mesh.model * mesh.sequence):
        sequence = f" x mesh.sequence={mesh.sequence}" if mesh.sequence > 1 else ""
        raise ValueError(
            f"data.length={length} does not divide into mesh.model={mesh.model}{sequence} parts, "
            "which each form some tokens' logits; make it a multiple."
        )
    partition = Partition(AbstractMesh(*_shape(mesh)), mesh.memory)
    if model.memory_layers:
        groups = training.memory.groups
        if training.memory.lifetime == "batch":
            groups //= training.micro_batches
        partition.memory_specs(model.fast_weight.rule, {})
        partition.check_groups(groups, sequences // groups)
    memory_mixer = [] if model.memory_mixer is None else [model.memory_mixer]
    for mixer in (*model.mixer_configs, *memory_mixer):
        for name, number in mixer.split_numbers.items():
            partition.check_divides(name, number, HEADS)


def _shape(config: MeshConfig) -> tuple[tuple[int, ...], tuple[str, ...], tuple[AxisType, ...]]:
    """Sizes, names and types of the axes, in the order of `jax.make_mesh`.

    With axes of type Auto the compiler chooses the layout of arrays that have no constraint.
    Explicit axes would need a layout for every gather.
    """
    sizes = {"data": config.data, "fsdp": config.fsdp}
    if config.sequence > 1:
        sizes[SEQUENCE] = config.sequence
    sizes[HEADS] = config.model  # Exchanges most, so that its devices are next to each other.
    return tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)


def state_shardings(
    partition: Partition, state: TrainState, *, graphdef: nnx.GraphDef[LanguageModel]
) -> TrainState:
    """The layout of every array of a state.

    Slow weights follow the axes that they declare, and so do the optimiser's arrays of a weight's
    shape. Memories follow the mesh's memory layout. Other arrays of the optimiser, scalars and
    random keys are on every device.

    Returns:
      A `TrainState` with a sharding in place of each array.
    """
    everywhere: Any = NamedSharding(partition.mesh, P())
    params = parameter_shardings(partition, state.params)
    rule = nnx.merge(graphdef, state.params).config.fast_weight.rule
    layouts = named_leaves(params)
    known = {name: (x.shape, layouts[name]) for name, x in named_leaves(state.params).items()}

    def of_optimizer(path: tuple[Any, ...], leaf: Any) -> Any:
        """The layout of the weight whose path ends this one's, if the shape is the weight's."""
        # By name, because some weights alone, if only these train, have their paths as keys.
        names = (path_name(path[at:]) for at in range(len(path)))
        found = (known[name] for name in names if name in known)
        shape, layout = next(found, (None, everywhere))
        return layout if shape == leaf.shape else everywhere

    opt_state = jax.tree.map_with_path(of_optimizer, state.opt_state)
    return TrainState(
        step=everywhere,
        params=params,
        opt_state=opt_state,
        memory=memory_shardings(partition, state.memory, rule),
        rng=everywhere,
    )


def memory_shardings(partition: Partition, memory: Memories, rule: AbstractRule) -> Memories:
    """The layout of memories by layer name.

    If there is one group, it is copied along the mesh axes that would split groups.

    Raises:
      ValueError: slots or columns do not divide into as many parts as the mesh asks for.
    """

    def of(spec: P, leaf: Any) -> NamedSharding:
        for what, size, axes in zip(("slots", "columns"), leaf.shape[1:], spec[1:], strict=False):
            axes = (axes,) if isinstance(axes, str) else axes or ()
            partition.check_divides(f"A value table of {what}", size, *axes)
        groups = spec[0] if leaf.shape[0] > 1 else None
        return NamedSharding(partition.mesh, _shortest(partition, P(groups, *spec[1:])))

    return {
        name: jax.tree.map(of, partition.memory_specs(rule, layer), layer)
        for name, layer in memory.items()
    }


def process_rows(partition: Partition | None, batch_size: int) -> list[int] | None:
    """Sorted indices of the batch rows that this process's devices work on; None: all rows."""
    if partition is None or jax.process_count() == 1:
        return None
    parts = partition.sharding(BATCH).addressable_devices_indices_map((batch_size,))
    rows = (range(batch_size)[part[0]] for part in parts.values() if part)
    return sorted(set().union(*rows))


def put_batch(partition: Partition | None, batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Puts a batch on the devices of the mesh; each process passes its `process_rows` only."""
    if partition is None:
        return batch
    return {
        name: jax.make_array_from_process_local_data(partition.sharding(BATCH), x)
        for name, x in batch.items()
    }


def on_one_device(partition: Partition | None, tree: Any) -> Any:
    """Gathers arrays that are split over devices onto this process's first device."""
    if partition is None:
        return tree
    if jax.process_count() > 1:
        everywhere = partition.sharding()
        tree = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        tree = jax.tree.map(lambda x: x.addressable_data(0), tree)
    return jax.device_put(tree, jax.local_devices()[0])


def _shortest(partition: Partition, spec: P) -> P:
    """A spec without mesh axes of size 1, as a compiled function's results have it.

    Arrays that lie alike, but whose specs differ, are compiled for twice.
    """
    entries = [partition.used(*((one,) if isinstance(one, str) else one or ())) for one in spec]
    return P(*(axes[0] if len(axes) == 1 else axes or None for axes in entries))
