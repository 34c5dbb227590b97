"""Creates a run from weights that another program trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.config import Experiment
from fwpkm_jax.host_memory import freed_memory_returned
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.state import TrainState, init_state
from fwpkm_jax.whole_files import check_local, new_folder, write_json


def start_run(
    experiment: Experiment,
    weights: Weights,
    *,
    add: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Writes a run whose step 0 has these weights; `fwpkm train` continues from there.

    The optimiser's state is not written: it starts with the first step of training. The directory
    gets its name once all is written: an import that is killed leaves no run.

    Args:
      experiment: the run's configuration; `experiment.run_dir` must be new or empty.
      weights: weights of `experiment.model`, with one memory per group of the configuration, or
        with one memory, from which all groups then start.
      add: writes further files into the directory it is given, which is the run's before it gets
        its name.

    Returns:
      The run's directory.

    Raises:
      ValueError: the directory is not empty, or the numbers of memories do not match.
    """
    directory = Path(experiment.run_dir)
    check_local(directory)
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; choose another run directory.")
    config = experiment.training

    def init() -> TrainState:
        return init_state(
            experiment.model, memory=config.memory, optimizer=None, seed=experiment.seed
        )

    params = jax.tree.map(jnp.asarray, weights.params)
    memory = jax.tree.map(_for_groups, weights.memory, jax.eval_shape(init).memory)
    # XLA drops the initial values of arrays that the weights replace.
    rest = jax.jit(lambda: init()._replace(params=None, memory={}))()
    state = rest._replace(params=params, memory=memory)
    # The weights may fill the memory: no more than the largest is written at a time.
    largest = max(x.nbytes for x in jax.tree.leaves((params, memory)))
    with new_folder(directory, may_be_empty=True) as new:
        add(new)
        write_json(new / "config.json", experiment.to_json())
        with (
            freed_memory_returned(),
            Checkpoints(
                new / "checkpoints", experiment.checkpoint, buffer_bytes=largest
            ) as checkpoints,
        ):
            checkpoints.save(state, data_position=None, config=experiment.to_json())
    return directory


def _for_groups(memory: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    memory = jnp.asarray(memory)
    if memory.shape[0] == like.shape[0]:
        return memory
    if memory.shape[0] != 1:
        raise ValueError(
            f"The weights hold {memory.shape[0]} memories per layer, the run carries "
            f"{like.shape[0]}; set training.memory.groups={memory.shape[0]}."
        )
    return jnp.broadcast_to(memory, like.shape)
