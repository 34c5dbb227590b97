"""Creates a run from weights that another program trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.config import Experiment
from fwpkm_jax.interchange.weights import Weights, check_shape, refuse_other_names
from fwpkm_jax.io.atomic import new_folder, write_json
from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.storage.host_memory import freed_memory_returned
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.runs.mirror import new_run_folder
from fwpkm_jax.training.state import TrainState, init_state


def start_run(
    experiment: Experiment,
    weights: Weights,
    *,
    add: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Writes a run whose step 0 has these weights; `fwpkm train` continues from there.

    Every weight is checked before anything is written, whatever importer read it. The optimiser's
    state is not written: it starts with the first step of training. The directory gets its name
    once all is written: an import that is killed leaves no run.

    Args:
      experiment: the run's configuration; `experiment.run_dir` must be new or empty. It may lie in
        a bucket.
      weights: weights of `experiment.model`, with one memory per group of the configuration, or
        with one memory, from which all groups then start.
      add: writes further files into the directory it is given, which is the run's before it gets
        its name.

    Raises:
      ValueError: the directory is not empty; an array has another shape than the model's, is of
        integers, or holds NaN or infinity; or the numbers of memories do not match.
      OSError: the bucket cannot be asked.
    """
    check_empty(experiment.run_dir)
    config = experiment.training

    def init() -> TrainState:
        return init_state(
            experiment.model, memory=config.memory, optimizer=None, seed=experiment.seed
        )

    like = jax.eval_shape(init)
    _check_arrays(weights, like)
    with np.errstate(over="ignore"):  # Gives an infinity, which is then found.
        params = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), weights.params, like.params)
        memory = jax.tree.map(_for_groups, weights.memory, like.memory)
    bad = non_finite_leaves(Weights(params, memory))
    if bad:
        more = f", and so do {len(bad) - 1} more arrays" if bad[1:] else ""
        raise ValueError(
            f"{bad[0]} holds NaN or infinity{more}; import weights from before they became so."
        )
    # XLA drops the initial values of arrays that the weights replace.
    rest = jax.jit(lambda: init()._replace(params=None, memory={}))()
    state = rest._replace(params=params, memory=memory)
    # The weights may fill the memory: no more than the largest is written at a time.
    largest = max(x.nbytes for x in jax.tree.leaves((params, memory)))
    with (
        new_run_folder(experiment.run_dir) as directory,
        new_folder(directory, may_be_empty=True) as new,
    ):
        add(new)
        write_json(new / "config.json", experiment.to_json())
        with (
            freed_memory_returned(),
            Checkpoints(
                new / "checkpoints", experiment.checkpoint, buffer_bytes=largest
            ) as checkpoints,
        ):
            checkpoints.save(state, data_position=None, config=experiment.to_json())
    return Path(experiment.run_dir)


def check_empty(directory: str | Path) -> None:
    """Raises ValueError unless a run can be made there, also in a bucket."""
    if scheme_of(directory) is not None:
        store = Store(str(directory))
        if store.sizes():
            raise ValueError(f"{store} is not empty; choose another run directory.")
        return
    directory = Path(directory)
    if directory.is_dir() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; choose another run directory.")


def _check_arrays(weights: Weights, like: TrainState) -> None:
    """Raises ValueError unless the weights are arrays of the model's names, shapes and kind."""
    groups = {leaf.shape[0] for leaf in jax.tree.leaves(weights.memory) if leaf.ndim}
    number = groups.pop() if len(groups) == 1 else 1
    found, expected = weights.named(), Weights(like.params, like.memory).named()
    refuse_other_names(found, expected, "The weights")
    for name, leaf in expected.items():
        shape = leaf.shape if name.startswith("params/") else (number, *leaf.shape[1:])
        check_shape(name, found[name].shape, shape, "The weights")
        if not jnp.issubdtype(found[name].dtype, jnp.floating):
            raise ValueError(f"{name} holds {found[name].dtype}; weights are of floating point.")


def _for_groups(memory: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    memory = jnp.asarray(memory, like.dtype)
    if memory.shape[0] == like.shape[0]:
        return memory
    if memory.shape[0] != 1:
        raise ValueError(
            f"The weights hold {memory.shape[0]} memories per layer, the run carries "
            f"{like.shape[0]}; set training.memory.groups={memory.shape[0]}."
        )
    return jnp.broadcast_to(memory, like.shape)
