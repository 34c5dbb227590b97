"""What a run takes of its devices' memory and of its disk, before anything is compiled."""

from collections.abc import Sequence
from typing import Any

import jax

from fwpkm_jax.config import Experiment
from fwpkm_jax.models.sharding import declarations
from fwpkm_jax.models.stream_size import device_bytes
from fwpkm_jax.training.checkpoints.checkpoint import item_bytes, readable
from fwpkm_jax.training.state import TrainState, named_leaves, trained_names


def check_memory(
    experiment: Experiment, shapes: TrainState, layout: TrainState, devices: Sequence[Any]
) -> None:
    """Raises ValueError if a step needs more memory than a device has, activations left out.

    Counted are what a device holds of the state, and of the gradients where all are there at once:
    they are clipped by their common norm, or added up over micro-batches. What a step computes
    comes on top, so a run that passes may still be too large.

    Args:
      experiment: the configuration.
      shapes: of the state.
      layout: the sharding of each array of the state.
      devices: that share the run.
    """
    sizes, there = _step_bytes(experiment, shapes, layout), _room(devices)
    del sizes["activations"]
    if experiment.optimizer.clip_norm is None and experiment.training.micro_batches == 1:
        del sizes["gradients"]
    if sum(sizes.values()) > there:
        raise ValueError(
            f"The state of this run takes {readable(sum(sizes.values()))} ({_told(sizes)}) of each "
            f"device, which has {readable(there)} of memory; make the model or its memory smaller "
            "(model.fast_weight.rule.num_subkeys, training.memory.groups), or share it among more "
            "devices (mesh)."
        )


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
    sizes, there = _step_bytes(experiment, shapes, layout), _room(devices)
    total = sum(sizes.values())
    doubt = ""
    if total > there:
        doubt = (
            " It may not fit: a shorter data.length, more training.micro_batches, training.remat "
            "and a mesh take less."
        )
    return (
        f"By estimate a step takes {readable(total)} of each device's {readable(there)} "
        f"({_told(sizes)}).{doubt}"
    )


def _step_bytes(experiment: Experiment, shapes: TrainState, layout: TrainState) -> dict[str, int]:
    """What a device holds in a step: of the state, the gradients and, by estimate, activations."""
    own = jax.tree.map(
        lambda x, held: jax.ShapeDtypeStruct(held.shard_shape(x.shape), x.dtype), shapes, layout
    )
    params = named_leaves(own.params)
    trained = trained_names(shapes.params, experiment.optimizer.train)
    gradients = sum(4 * params[name].size for name in trained)
    activations = _activation_bytes(experiment, shapes)
    return item_bytes(own) | {"gradients": gradients, "activations": activations}


def _room(devices: Sequence[Any]) -> int:
    """Bytes of memory of each device."""
    ours = [x for x in devices if x.process_index == jax.process_index()]
    return device_bytes(ours) * jax.process_count() // len(devices)


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
