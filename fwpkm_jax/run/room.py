"""What a run takes of its devices' memory and of its disk, before anything is compiled."""

from collections.abc import Sequence
from typing import Any

import jax

from fwpkm_jax.config import Experiment
from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.models.stream_size import device_bytes
from fwpkm_jax.training.checkpoints.checkpoint import item_bytes, readable
from fwpkm_jax.training.state import TrainState, named_leaves, trained_names


def check_memory(shapes: TrainState, devices: Sequence[Any]) -> None:
    """Raises ValueError if the state alone takes more memory than the devices have together.

    What a step computes comes on top, so a state that passes may still be too large.

    Args:
      shapes: of the state.
      devices: that share it.
    """
    sizes, there = item_bytes(shapes), memory_of(devices)
    if sum(sizes.values()) > there:
        raise ValueError(
            f"The state of this run takes {readable(sum(sizes.values()))} ({_told(sizes)}), and "
            f"there are {readable(there)} of memory; make the model or its memory smaller "
            "(model.fast_weight.rule.num_subkeys, training.memory.groups), or share it among more "
            "devices (mesh)."
        )


def memory_of(devices: Sequence[Any]) -> int:
    """Bytes that the devices of all processes have together."""
    ours = [x for x in devices if x.process_index == jax.process_index()]
    return device_bytes(ours) * jax.process_count()


def describe_memory(
    experiment: Experiment, shapes: TrainState, layout: TrainState, devices: Sequence[Any]
) -> str:
    """A sentence on the memory that a training step needs of each device.

    State and gradients are counted. Activations are an estimate: of each linear map its input and
    its output for each token of a micro-batch, twice in their dtype. What compiled programs took
    was 1.2 to 2.4 times as much.

    Args:
      experiment: the configuration.
      shapes: of the state.
      layout: the sharding of each array of the state.
      devices: that share the run.
    """
    own = jax.tree.map(
        lambda x, held: jax.ShapeDtypeStruct(held.shard_shape(x.shape), x.dtype), shapes, layout
    )
    sizes = item_bytes(own)
    params = named_leaves(own.params)
    trained = trained_names(shapes.params, experiment.optimizer.train)
    sizes["gradients"] = sum(4 * params[name].size for name in trained)
    sizes["activations"] = _activation_bytes(experiment, shapes)
    there = memory_of(devices) // len(devices)
    return (
        f"By estimate a step takes {readable(sum(sizes.values()))} of each device's "
        f"{readable(there)} ({_told(sizes)})."
    )


def _told(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())


def _activation_bytes(experiment: Experiment, shapes: TrainState) -> int:
    """Bytes of activations that a device keeps for the backward pass, roughly."""
    mesh, config, model = experiment.mesh, experiment.training, experiment.model
    roles = declarations(shapes.params)
    layers, memories = [0] * len(model.mixers), 0
    for name, x in named_leaves(shapes.params).items():
        if name.startswith("blocks/") and roles[name].role == "matrix":
            layers[int(name.split("/")[1])] += sum(x.shape[-2:])
            memories += sum(x.shape[-2:]) if "/memory/" in name else 0
    widths = sum(layers)
    if config.remat is not None:  # Inputs of layers, the memories, and a layer that is done again.
        widths = len(layers) * model.model_dim + memories + max(layers)
    tokens = config.batch_size * experiment.data.length // config.micro_batches
    number = 4 if model.activation_dtype == "bfloat16" else 8
    return number * widths * tokens // mesh.num_devices
