"""Writes checkpoints while training goes on, and finds the newest complete one.

A checkpoint is a directory `checkpoints/STEP` with the items `params`, `optimizer`, `memory`
(arrays), `position` (step, random root, data position, checksums, metrics) and `config`.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from fwpkm_jax.io.atomic import own_folder
from fwpkm_jax.literals import Bound, Checked, Count
from fwpkm_jax.training.checkpoints.checksum import checksums
from fwpkm_jax.training.checkpoints.regroup import Regroup, first_memory
from fwpkm_jax.training.checkpoints.restore import (
    DamagedCheckpointError,
    Reference,
    Restored,
    array_items,
    brief,
    check_files,
    checkpoint_steps,
    nested,
    read_checkpoint,
)
from fwpkm_jax.training.runs.processes import from_first, is_first, together
from fwpkm_jax.training.state import TrainState, named_leaves

logger = logging.getLogger(__name__)

_TEMPORARY = ".orbax-checkpoint-tmp"
_EACH = ocp.options.MultiprocessingOptions(primary_host=None)  # Each process has its own folder.
_CHUNK_BYTES = 2**20  # Orbax warns of less, once per array.


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Checked):
    """When a run is saved and which checkpoints stay."""

    every: Count = 100
    """Steps between two checkpoints. The last step is always saved."""
    keep: Annotated[int, Bound(2)] = 3
    """Newest checkpoints to keep. The one with the lowest validation loss is kept as well."""
    memories: Literal["all", "first", "none"] = "all"
    """Which fast-weight memories are saved. first: only the first; a resumed run copies it to all
    groups. none: a resumed run starts from the initial memory. Checkpoints with many memories
    become smaller, but resuming is no longer exact."""
    regroup: Regroup = "refuse"
    """What happens if a run continues with another memory.groups. refuse: it does not start.
    first: neighbouring memories become the first of them. mean: they become their mean. With first
    and mean, additional groups are copies of the saved ones."""
    # If the newest is damaged by whatever ended the run, the one before it is needed.

    @property
    def merge(self) -> Regroup:
        """How the number of saved memories is changed to that of the run, see `regroup`."""
        if self.memories == "first" and self.regroup == "refuse":
            return "first"
        return self.regroup

    def saved_memory(self, memory: Any) -> Any:
        """The part of a run's memories that is saved."""
        if self.memories == "first" and memory:
            return first_memory(memory)
        return memory if self.memories == "all" else {}


class Checkpoints:
    """A run's checkpoint directory, open for writing. Use as a context manager.

    On exit it waits until all checkpoints are on disk. In a run of several processes all make the
    same calls; each process writes the parts on its own devices.
    """

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        *,
        buffer_bytes: int | None = None,
        shared: bool = True,
    ) -> None:
        """Opens the directory, and makes it where it is not there.

        Args:
          directory: `RUN/checkpoints`.
          config: when to save and what to keep.
          buffer_bytes: most bytes of arrays that are written at a time, at least those of the
            largest one, for models that fill the host's memory; saving then takes longer. None:
            all.
          shared: whether all processes use the same directory. If not, each one's checkpoints
            hold its own parts alone, which are not merged.
        """
        self._shared = shared
        self.directory = Path(directory).absolute()
        with together():
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            own_folder(self.directory)
            for path in self.directory.iterdir():
                if path.is_symlink():  # Old checkpoints are deleted.
                    own_folder(path)
            for path in sorted(self.directory.glob(f"*{_TEMPORARY}*")) if is_first() else ():
                logger.warning("Removing checkpoint %s: it was never completed.", path)
        self._config, self._buffer_bytes = config, buffer_bytes
        self.reference: Reference | None = None
        """Frozen slow weights that stay in another checkpoint; None: checkpoints hold all."""
        for step in checkpoint_steps(self.directory):
            check_files(self.directory / str(step))
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
        who = ocp.options.MultiprocessingOptions() if self._shared else _EACH
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            multiprocessing_options=who,
            # Folders that are made beside the writes are announced once for all processes.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=self._shared),
        )
        handlers: dict[str, Any] | None = None
        if self._buffer_bytes is not None or not self._shared:
            most: Any = 96  # Orbax's default.
            if self._buffer_bytes is not None:  # A little more: an array must take less than all.
                most = (self._buffer_bytes + 1000) / 1e9
            arrays = ocp.StandardCheckpointHandler(
                save_concurrent_gb=most, multiprocessing_options=who
            )
            if not self._shared:
                arrays.finalize = lambda directory: None  # It would merge what others wrote.
                logging.getLogger("absl").addFilter(_is_news)
            json = ocp.JsonCheckpointHandler(multiprocessing_options=who)
            handlers = {"position": json, "config": json}
            for name in ("params", "optimizer", "memory"):
                handlers[name] = arrays
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of the storage layer into one OSError, for example if the disk is full."""
        try:
            yield
        except Exception as error:
            raise OSError(
                f"A checkpoint could not be written ({brief(error)}); whole ones in "
                f"{self.directory}: {self.steps}"
            ) from error

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
        """Starts to write a checkpoint and returns as soon as `state` may be donated.

        If this step is already saved, nothing is written. Waits for the previous checkpoint.

        Args:
          state: what to save; the caller must check that it is finite.
          data_position: the data iterator's `get_state()`, JSON values; None: the start.
          config: the experiment as JSON.
          metrics: validation metrics of this step; `loss` decides which checkpoint is best.

        Raises:
          OSError: this checkpoint or the previous one could not be written.
        """
        step = int(state.step)
        if from_first(step in self.steps):
            return
        items = array_items(
            state._replace(
                params=self._own_params(state.params),
                memory=self._config.saved_memory(state.memory),
            )
        )
        position = {
            "step": step,
            "rng": jax.random.key_data(state.rng).tolist(),
            "data": data_position,
            "checksums": {name: checksums(tree) for name, tree in items.items()},
            "metrics": dict(metrics or {}),
        }
        if self.reference is not None:
            position["frozen"] = self.reference._asdict()
        if not self._shared:
            # Orbax keeps who writes once for all handlers; one that read meanwhile has changed it.
            ocp.PyTreeCheckpointHandler(multiprocessing_options=_EACH)
        arguments = {name: self._array_arguments(nested(tree)) for name, tree in items.items()}
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **arguments,
                    position=ocp.args.JsonSave(position),
                    config=ocp.args.JsonSave(dict(config)),
                ),
                metrics={"loss": metrics["loss"]} if metrics else None,
                force=True,  # The training loop decides when to save.
            )

    def _array_arguments(self, tree: Any) -> ocp.args.StandardSave:
        if self._buffer_bytes is None:
            return ocp.args.StandardSave(tree)
        # What is encoded is a copy: of a chunk, not of a whole array.
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
        return ocp.args.StandardSave(tree, save_args=chunks)

    def _own_params(self, params: Any) -> Any:
        """The slow weights that this run's checkpoints hold themselves."""
        if self.reference is None:
            return params
        elsewhere = self.reference.checksums
        return {name: x for name, x in named_leaves(params).items() if name not in elsewhere}

    def describe(self, abstract: TrainState) -> str:
        """A sentence on the disk space that a checkpoint of this state takes."""
        abstract = abstract._replace(params=self._own_params(abstract.params))
        sizes = item_bytes(abstract)
        if self._config.memories == "none":
            sizes.pop("memory", None)
        elif self._config.memories == "first" and "memory" in sizes:
            sizes["memory"] //= jax.tree.leaves(abstract.memory)[0].shape[0]
        parts = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items())
        free = shutil.disk_usage(self.directory).free
        return (
            f"A checkpoint takes {readable(sum(sizes.values()))} ({parts}); up to "
            f"{self._config.keep + 1} are kept in {self.directory}, where {readable(free)} are "
            "free."
        )

    def wait(self) -> None:
        """Waits until every checkpoint is complete.

        Raises:
          OSError: a checkpoint could not be written; the message lists the complete ones.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def restore_newest(
        self, abstract: TrainState, layout: TrainState | None = None
    ) -> Restored | None:
        """The newest undamaged checkpoint, or None if the run was never saved.

        A damaged checkpoint is named in a warning and moved to `damaged_checkpoints` beside the
        directory, so that its step can be saved again. Nothing is deleted.

        Raises:
          DamagedCheckpointError: there are checkpoints, but all of them are damaged.
        """
        damaged = []
        restored = None
        for step in reversed(from_first(self.steps)):
            try:
                restored = read_checkpoint(
                    self.directory, step, abstract, layout, merge=self._config.merge
                )
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
        if restored is not None:
            self.reference = restored.reference
        return restored

    def _set_aside(self, steps: list[int]) -> None:
        self._manager.close()
        with together():
            aside = own_folder(self.directory.parent / "damaged_checkpoints")
            for step in steps if is_first() or not self._shared else ():
                taken = len(list(aside.glob(f"{step}*")))
                name = f"{step}.{taken}" if taken else str(step)
                (self.directory / str(step)).rename(aside / name)
        self._manager = self._open()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of Orbax's says more than that each process writes for itself."""
    return "primary_host=None" not in record.getMessage()


def item_bytes(abstract: TrainState) -> dict[str, int]:
    """Bytes of slow weights, optimiser's state and memories, from arrays or their shapes."""
    return {
        name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for name, tree in array_items(abstract).items()
    }


def readable(size: int) -> str:
    """A number of bytes with three digits, such as 1.1 TB."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"
