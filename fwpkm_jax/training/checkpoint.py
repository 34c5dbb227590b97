"""Checkpoints: written while training goes on, checked when read, the newest whole one found.

A checkpoint is a directory `checkpoints/STEP` with the items `params`, `optimizer`, `memory`
(arrays), `position` (step, random root, data position, checksums, metrics) and `config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from fwpkm_jax.training.checksum import checksums
from fwpkm_jax.training.state import TrainState, named_leaves

logger = logging.getLogger(__name__)

_TEMPORARY = ".orbax-checkpoint-tmp"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run is saved and which checkpoints stay."""

    every: int = 100
    """Steps between two checkpoints. The last step is always saved."""
    keep: int = 3
    """Newest checkpoints kept, beside the one of the lowest validation loss."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step.")
        if self.keep < 2:
            raise ValueError(
                f"keep={self.keep} must be at least 2: if the newest is damaged by whatever ended "
                "the run, the one before it is needed."
            )


class DamagedCheckpointError(Exception):
    """A checkpoint that cannot be read, or reads as something other than what was written."""


class Restored(NamedTuple):
    """A checkpoint, read and checked."""

    state: TrainState
    data_position: Any
    """What the data iterator's `get_state` gave; None: it stands at its start."""
    metrics: dict[str, float]
    """Validation metrics at that step; empty where none were taken."""


def _array_items(state: TrainState) -> dict[str, Any]:
    """The items of a checkpoint that are arrays; items without any array are left out."""
    items = {"params": state.params, "optimizer": state.opt_state, "memory": state.memory}
    return {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}


def _nested(tree: Any) -> dict[str, Any]:
    """A tree's arrays in plain nested dicts, independent of the classes that held them."""
    nested: dict[str, Any] = {}
    for name, leaf in named_leaves(tree).items():
        *parents, last = name.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return nested


def _like(tree: Any, nested: Mapping[str, Any]) -> Any:
    """The arrays of `_nested` back in the classes of `tree`."""
    leaves = named_leaves(nested)
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)]
    )


def checkpoint_steps(directory: str | Path) -> list[int]:
    """Steps of the complete checkpoints in a directory, oldest first."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


class Checkpoints:
    """A run's checkpoint directory, open for writing. Use as a context manager.

    Leaving it waits until everything begun is on disk.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig) -> None:
        self.directory = Path(directory).absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.directory.glob(f"*{_TEMPORARY}*")):
            logger.warning("Removing checkpoint %s: it was never completed.", path)
        self._config = config
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(self._config.keep),
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics["loss"],
                    reverse=True,  # Lowest first.
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            save_decision_policy=_EveryRequest(),
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return checkpoint_steps(self.directory)

    def save(
        self,
        state: TrainState,
        *,
        data_position: Any,
        config: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to write a checkpoint and returns once `state` may be donated.

        A step that is already saved is left as it is. Waits for the checkpoint before this one.

        Args:
          state: what to save; the caller has made sure that it is finite.
          data_position: the data iterator's `get_state()`, JSON values; None: at its start.
          config: the experiment as JSON.
          metrics: validation metrics of this step; `loss` decides which checkpoint is best.
        """
        step = int(state.step)
        if step in self.steps:
            return
        items = _array_items(state)
        position = {
            "step": step,
            "rng": jax.random.key_data(state.rng).tolist(),
            "data": data_position,
            "checksums": {name: checksums(tree) for name, tree in items.items()},
            "metrics": dict(metrics or {}),
        }
        arguments = {name: ocp.args.StandardSave(_nested(tree)) for name, tree in items.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                **arguments,
                position=ocp.args.JsonSave(position),
                config=ocp.args.JsonSave(dict(config)),
            ),
            metrics={"loss": metrics["loss"]} if metrics else None,
        )

    def wait(self) -> None:
        """Returns once every checkpoint begun is complete; raises what went wrong in writing."""
        self._manager.wait_until_finished()

    def restore_newest(self, abstract: TrainState) -> Restored | None:
        """The newest whole checkpoint, or None if the run was never saved.

        A damaged one is named in a warning and moved to `damaged_checkpoints` beside the
        directory, so that its step can be saved again; nothing is deleted.

        Raises:
          DamagedCheckpointError: there are checkpoints but none of them is whole.
        """
        damaged = []
        restored = None
        for step in reversed(self.steps):
            try:
                restored = read_checkpoint(self.directory, step, abstract)
                break
            except DamagedCheckpointError as error:
                logger.warning("Skipping a damaged checkpoint: %s", error)
                damaged.append(step)
        if restored is None and damaged:
            raise DamagedCheckpointError(
                f"None of the checkpoints {sorted(damaged)} in {self.directory} can be read; "
                "choose another run_dir to start anew."
            )
        if damaged:
            self._set_aside(damaged)
        return restored

    def _set_aside(self, steps: list[int]) -> None:
        self._manager.close()
        aside = self.directory.parent / "damaged_checkpoints"
        aside.mkdir(exist_ok=True)
        for step in steps:
            taken = len(list(aside.glob(f"{step}*")))
            (self.directory / str(step)).rename(aside / (f"{step}.{taken}" if taken else str(step)))
        self._manager = self._open()


class _EveryRequest(checkpoint_managers.SaveDecisionPolicy):
    """The loop decides when to save; the manager follows."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        del step, previous_steps, context
        return True


def read_checkpoint(directory: str | Path, step: int, abstract: TrainState) -> Restored:
    """One checkpoint, every array's shape, dtype and checksum verified.

    Args:
      directory: `RUN/checkpoints`.
      step: which.
      abstract: shapes and dtypes to restore into, from `jax.eval_shape` of `init_state`; with an
        empty `opt_state` the optimiser's state is not read.

    Raises:
      DamagedCheckpointError: names the checkpoint and what is wrong with it.
    """
    path = Path(directory).absolute() / str(step)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    items = _array_items(abstract)
    arguments = {
        name: ocp.args.StandardRestore(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), _nested(tree)
            )
        )
        for name, tree in items.items()
    }
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            read = checkpointer.restore(
                path, args=ocp.args.Composite(**arguments, position=ocp.args.JsonRestore())
            )
        position = read["position"]
        arrays = {name: _like(tree, read[name]) for name, tree in items.items()}
        expected = {name: position["checksums"][name] for name in items}
        rng = jax.random.wrap_key_data(jnp.asarray(position["rng"], jnp.uint32))
        if position["step"] != step:
            raise ValueError(f"it holds step {position['step']}")
    except Exception as error:  # Whatever a broken file makes the readers raise.
        raise DamagedCheckpointError(f"{path}: {_brief(error)}") from error
    for name, tree in arrays.items():
        actual = checksums(tree)
        wrong = [leaf for leaf in actual if actual[leaf] != expected[name].get(leaf)]
        if wrong:
            raise DamagedCheckpointError(
                f"{path}: {name}/{wrong[0]} is not what was saved (its checksum differs)"
            )
    state = TrainState(
        step=jnp.asarray(step, jnp.int32),
        params=arrays["params"],
        opt_state=arrays.get("optimizer", abstract.opt_state),
        memory=arrays.get("memory", abstract.memory),
        rng=rng,
    )
    return Restored(state, position["data"], position["metrics"])


def find_step(directory: str | Path, which: int | Literal["best"] | None) -> int:
    """The step of the checkpoint asked for.

    Args:
      directory: `RUN/checkpoints`.
      which: a step, "best" for the lowest validation loss, None for the newest.

    Raises:
      FileNotFoundError: there is no such checkpoint; those that exist are listed.
    """
    steps = checkpoint_steps(directory)
    if not steps:
        raise FileNotFoundError(f"{directory} holds no complete checkpoint.")
    if which is None:
        return steps[-1]
    if which == "best":
        metrics = {step: read_metrics(directory, step) for step in steps}
        judged = {step: values["loss"] for step, values in metrics.items() if values}
        if not judged:
            raise FileNotFoundError(
                f"No checkpoint in {directory} has a validation loss to be the best by; "
                f"name a step out of {steps} or set training.validate_every."
            )
        return min(judged, key=lambda step: judged[step])
    if which not in steps:
        raise FileNotFoundError(f"There is no checkpoint of step {which} in {directory}: {steps}.")
    return which


def read_metrics(directory: str | Path, step: int) -> dict[str, float]:
    """The validation metrics saved with a checkpoint; empty if there are none or it is damaged."""
    path = Path(directory).absolute() / str(step)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            read = checkpointer.restore(
                path, args=ocp.args.Composite(position=ocp.args.JsonRestore())
            )
        return read["position"]["metrics"]
    except Exception as error:  # As in `read_checkpoint`.
        logger.warning("Skipping a damaged checkpoint: %s: %s", path, _brief(error))
        return {}


def _brief(error: Exception) -> str:
    """An error in one line; the storage layer's go on for pages."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:300] + " ..."
