"""Builds the parts of a training run from its configuration, one function for each."""

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fwpkm_jax.config import Experiment
from fwpkm_jax.data import make_dataset, vocab_size
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.remat import check_offload
from fwpkm_jax.run.room import check_memory, describe_memory
from fwpkm_jax.storage.addresses import address_of, scheme_of
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.restore import (
    Reference,
    checkpoint_steps,
    find_step,
    read_arrays,
    read_metrics,
    stored_names,
    targets,
)
from fwpkm_jax.training.compiling import compile_answering
from fwpkm_jax.training.micro_batches import Batch
from fwpkm_jax.training.optimizer import learning_rate_schedule, make_optimizer
from fwpkm_jax.training.random_window import RandomWindow, random_window
from fwpkm_jax.training.runs.mirror import run_folder
from fwpkm_jax.training.runs.processes import from_first
from fwpkm_jax.training.sharding import (
    check_mesh,
    make_partition,
    process_rows,
    put_batch,
    state_shardings,
)
from fwpkm_jax.training.state import (
    TrainState,
    init_state,
    model_graph,
    named_leaves,
    trained_names,
    trained_part,
)
from fwpkm_jax.training.step import TrainStep, make_train_step
from fwpkm_jax.training.trained import check_trained
from fwpkm_jax.training.validation import Validation, make_validation


class Setup(NamedTuple):
    """The parts of a run before it starts; no array is allocated and no file is written yet."""

    experiment: Experiment
    """The configuration."""
    partition: Partition | None
    """Layout over devices; None: one device."""
    graphdef: nnx.GraphDef[LanguageModel]
    """The model's structure."""
    windowed: RandomWindow | None
    """The structure with windows in place of full attention, for the steps that draw it; None if
    no step does."""
    optimizer: optax.GradientTransformation
    """The optimizer of the slow weights."""
    init: Callable[[], TrainState]
    """Makes the state before the first step; traceable."""
    shapes: TrainState
    """Shapes and dtypes of that state."""

    def put(self, batch: Batch) -> Batch:
        """The batch, placed on the devices."""
        return put_batch(self.partition, batch)


def make_setup(experiment: Experiment) -> Setup:
    """The parts of a run.

    Raises:
      ValueError: fields of the configuration contradict each other or do not fit the devices, or
        a parameter does not say what it is.
    """
    config = experiment.training
    needed = vocab_size(experiment.data)
    if experiment.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={experiment.model.vocab_size} is smaller than the data's "
            f"{needed} tokens; raise it to {needed}."
        )
    check_offload(config.remat, jax.local_devices()[0])
    check_chunk_size(experiment)
    check_documents(experiment)
    check_mesh(
        experiment.mesh,
        model=experiment.model,
        training=config,
        length=experiment.data.length,
    )
    partition = make_partition(experiment.mesh)
    optimizer = make_optimizer(experiment.optimizer, steps=config.steps)
    init = partial(
        init_state,
        experiment.model,
        memory=config.memory,
        optimizer=optimizer,
        seed=experiment.seed,
        train=experiment.optimizer.train,
        precision=experiment.optimizer.precision,
    )
    shapes = jax.eval_shape(init)
    check_trained(shapes.params, experiment.optimizer.train)
    windowed = random_window(experiment.model, config.window_probability)
    graphdef = model_graph(experiment.model)
    setup = Setup(experiment, partition, graphdef, windowed, optimizer, init, shapes)
    check_memory(experiment, shapes, state_layout(setup), devices_of(partition))
    return setup


def devices_of(partition: Partition | None) -> list[Any]:
    """The devices that share a run."""
    return jax.local_devices()[:1] if partition is None else jax.devices()


def check_chunk_size(experiment: Experiment) -> None:
    """Checks that a token can read what the memory wrote.

    A chunk is written after it was read. With one chunk per sequence, a memory that is reset for
    each batch is therefore never read after a write.

    Raises:
      ValueError: a chunk takes the whole sequence, and the memory's lifetime is one batch.
    """
    model, length = experiment.model, experiment.data.length
    chunk_size = model.fast_weight.chunk_size
    fresh = experiment.training.memory.lifetime == "batch"
    if model.memory_layers and fresh and chunk_size >= length:
        raise ValueError(
            f"model.fast_weight.chunk_size={chunk_size} takes the whole of a sequence of "
            f"data.length={length} tokens, and training.memory.lifetime=batch drops the memory "
            f"after it: no token could read what was written. Choose a chunk_size below {length}, "
            "or training.memory.lifetime=carried."
        )


def check_documents(experiment: Experiment) -> None:
    """Checks that each document starts from an initial memory where that is asked for.

    Raises:
      ValueError: the memory is carried from batch to batch.
    """
    model, memory = experiment.model, experiment.training.memory
    each = model.memory_layers and model.fast_weight.documents == "document"
    if each and memory.lifetime == "carried":
        raise ValueError(
            "model.fast_weight.documents=document starts each document from the memory that a "
            "batch begins with, and training.memory.lifetime=carried begins with what the last "
            "batch wrote; use training.memory.lifetime=batch."
        )


def batches_of(setup: Setup, split: Literal["train", "valid"]) -> Any:
    """An iterator over a split's batches; each batch holds the rows of this process only."""
    experiment = setup.experiment
    batch_size = experiment.training.batch_size
    dataset = make_dataset(
        experiment.data,
        split=split,
        batch_size=batch_size,
        seed=experiment.seed,
        rows=process_rows(setup.partition, batch_size),
    )
    return iter(dataset)


def default_validation(setup: Setup) -> Validation | None:
    """The loss of the data's held-out split; None if `training.validation_batches` is 0.

    Raises:
      ValueError: the split has no whole batch.
    """
    config = setup.experiment.training
    count = config.validation_batches
    if not count:
        return None
    with contextlib.closing(batches_of(setup, "valid")) as held_out:
        batches = list(itertools.islice(held_out, count))
    if not batches:
        raise ValueError(
            f"The data's valid split gives no batch of batch_size={config.batch_size}; "
            "enlarge it, or turn validation off with training.validation_batches=0."
        )
    return make_validation(
        batches,
        memory=config.memory,
        micro_batches=config.micro_batches,
        partition=setup.partition,
    )


def restore_state(
    setup: Setup, checkpoints: Checkpoints, batches: Any, *, say: Callable[[str], None]
) -> TrainState | None:
    """The newest checkpoint's state, with `batches` moved to its data position.

    Returns:
      The state; None if the run was never saved.

    Raises:
      ValueError: the checkpoint has more steps than the configuration.
      DamagedCheckpointError: there are checkpoints, but none can be read.
    """
    shapes = setup.shapes
    layout = state_layout(setup)
    written = shapes
    if setup.experiment.base is not None:  # The rest is the base's.
        train = setup.experiment.optimizer.train
        written = shapes._replace(params=trained_part(shapes.params, train))
    say(checkpoints.describe(written))
    say(describe_memory(setup.experiment, shapes, layout, devices_of(setup.partition)))
    restored = checkpoints.restore_newest(shapes, layout)
    if restored is None:
        return None
    if restored.data_position is not None:  # None: imported weights.
        batches.set_state(restored.data_position)
    state, steps = restored.state, setup.experiment.training.steps
    step = int(state.step)
    if step > steps:
        directory = setup.experiment.run_dir
        raise ValueError(
            f"training.steps={steps}, but {directory} has {step} steps done; raise training.steps "
            "or choose another --run_dir."
        )
    if shapes.memory and not state.memory:
        say(f"The checkpoint of step {step} holds no memories; new ones are used.")
        fresh = jax.jit(lambda: setup.init().memory, out_shardings=layout.memory)
        state = state._replace(memory=fresh())
    if not jax.tree.leaves(state.opt_state):  # Imported weights.
        state = state._replace(opt_state=_optimizer_state(setup, state.params, layout))
    return state


def _optimizer_state(setup: Setup, params: Any, layout: TrainState) -> Any:
    """The optimizer's state before the first step."""
    train = setup.experiment.optimizer.train
    start = jax.jit(
        lambda params: setup.optimizer.init(trained_part(params, train)),
        out_shardings=layout.opt_state,
    )
    return start(params)


def new_state(setup: Setup, checkpoints: Checkpoints) -> TrainState:
    """The state before the first step, on its devices; with `base`, from another run's weights.

    Args:
      checkpoints: the run's checkpoints. Frozen weights of the base are set as their `reference`,
        so that they are not written again.

    Raises:
      ValueError: the base's weights do not fit the model.
      FileNotFoundError: the base is not there, or has no checkpoint.
    """
    base = setup.experiment.base
    if base is not None:
        with run_folder(base, checkpoints="newest") as folder:
            return _state_from(base, folder, setup, checkpoints)
    layout = state_layout(setup)
    return compile_answering(jax.jit(setup.init, out_shardings=layout))()


def _state_from(base: str, folder: Path, setup: Setup, checkpoints: Checkpoints) -> TrainState:
    """The state before the first step with the weights of another run's newest checkpoint."""
    directory = folder.absolute() / "checkpoints"
    if scheme_of(base) is not None and not checkpoint_steps(directory):
        raise FileNotFoundError(f"base={base} holds no complete checkpoint.")
    checkpoint = directory / str(find_step(directory, None))
    shapes = setup.shapes
    layout = state_layout(setup)
    stored = stored_names(checkpoint, "params")
    ours = named_leaves(shapes.params)
    new = [name for name in ours if name not in stored]
    _check_base(base, stored, ours, new)

    def with_read(item: Literal["params", "memory"], drawn: dict[str, jax.Array]) -> Any:
        """An item of the state, of which what was not drawn is read."""
        tree = getattr(shapes, item)
        wanted = targets(tree, getattr(layout, item))
        missing = {name: like for name, like in wanted.items() if name not in drawn}
        found = drawn | read_arrays(checkpoint, missing, item=item)
        return jax.tree.unflatten(jax.tree.structure(tree), [found[name] for name in wanted])

    def draw() -> tuple[dict[str, jax.Array], TrainState]:
        state = setup.init()
        named = named_leaves(state.params)
        # A new memory's output projection starts at zero, so that the model's output is unchanged.
        drawn = {
            name: jnp.zeros_like(named[name]) if "/memory/out_proj/" in name else named[name]
            for name in new
        }
        return drawn, state._replace(params=None, opt_state=())

    named = named_leaves(layout.params)
    places = {name: named[name] for name in new}, layout._replace(params=None, opt_state=())
    drawn, state = jax.jit(draw, out_shardings=places)()
    params, old = with_read("params", drawn), stored_names(checkpoint, "memory")
    memory = {name: x for name, x in named_leaves(state.memory).items() if name not in old}
    memory = with_read("memory", memory)
    train = setup.experiment.optimizer.train
    if train:
        trained = trained_names(shapes.params, train)
        frozen = {name: stored[name] for name in ours if name not in {*new, *trained}}
        # A copy ends with this function; its address stays.
        name = str(checkpoint)
        if scheme_of(base) is not None:
            name = f"{address_of(base).rstrip('/')}/checkpoints/{checkpoint.name}"
        checkpoints.reference = Reference(name, frozen)
    return state._replace(
        params=params, memory=memory, opt_state=_optimizer_state(setup, params, layout)
    )


def _check_base(base: str, stored: Iterable[str], ours: Iterable[str], new: Iterable[str]) -> None:
    """Raises ValueError if the model lacks weights of its base, or adds other kinds."""
    lost = [name for name in stored if name not in ours]
    if lost:
        raise ValueError(
            f"base={base} has {lost[0]}, for which the model has no place; leave its layers as "
            "they are."
        )
    added = r"blocks/\d+/memory(_mixer\w*)?/|.*/lora_[ab]$"
    other = [name for name in new if not re.match(added, name)]
    if other:
        raise ValueError(
            f"base={base} has no {other[0]}; only memories (model.memory_layers) and low-rank "
            "updates (model.lora) can be added."
        )


def state_layout(setup: Setup) -> TrainState:
    """The sharding of each array of the state, in `TrainState`'s structure.

    A new state and a restored one get the same one. On one device, too, it is given: an array
    whose device is only JAX's default is compiled for by itself.
    """
    if setup.partition is None:
        device: Any = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: device, setup.shapes)
    return state_shardings(setup.partition, setup.shapes, graphdef=setup.graphdef)


def compile_step(setup: Setup, state: TrainState, batch: Batch) -> TrainStep:
    """The training step, compiled for this state and a batch from `Setup.put`."""
    config = setup.experiment.training
    step = make_train_step(
        setup.graphdef,
        setup.optimizer,
        schedule=learning_rate_schedule(setup.experiment.optimizer, steps=config.steps),
        micro_batches=config.micro_batches,
        memory=config.memory,
        train=setup.experiment.optimizer.train,
        windowed=setup.windowed,
        loss_block=config.loss_block,
        remat=config.remat,
        partition=setup.partition,
    )
    return compile_answering(step, state, batch)


def best_loss(checkpoints: Checkpoints) -> float:
    """The lowest validation loss of the checkpoints in nats; infinity if none was validated."""
    losses = [
        metrics["loss"]
        for step in checkpoints.steps
        if (metrics := read_metrics(checkpoints.directory, step))
    ]
    return min(from_first(losses), default=math.inf)
