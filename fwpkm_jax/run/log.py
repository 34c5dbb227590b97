"""Writes the records of a run into its directory, and progress lines to the terminal.

Only the first process writes; the logs of the other processes do nothing.
"""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.io.atomic import remove_unfinished, write_json
from fwpkm_jax.io.untrusted import read_json
from fwpkm_jax.storage.addresses import scheme_of
from fwpkm_jax.storage.lock import Lock
from fwpkm_jax.storage.sync import Part
from fwpkm_jax.training.runs.metrics import (
    MetricsWriter,
    Sink,
    TensorBoard,
    WeightsAndBiases,
    import_wandb,
)
from fwpkm_jax.training.runs.mirror import Mirror
from fwpkm_jax.training.runs.processes import from_first, is_first, together
from fwpkm_jax.training.runs.progress import Progress
from fwpkm_jax.training.runs.run_directory import (
    find_config,
    make_directory,
    record_session,
    refuse_changes,
)
from fwpkm_jax.training.training_config import WITHOUT_EFFECT


class RunLog:
    """The log of one session of a run; leaving its context closes its files and frees its lock."""

    def __init__(self, experiment: Experiment, *, stream: TextIO | None) -> None:
        """Creates a log; it writes no file before `claim`.

        Args:
          experiment: the run's configuration.
          stream: where progress lines are printed; None: standard output.

        Raises:
          ValueError: the experiment logs to wandb, which is not installed; or `run_dir` is an
            address, and its package is not installed.
        """
        training = experiment.training
        self.name = experiment.run_dir
        """What messages call the run's directory, which may lie in a bucket."""
        self._mirror = _mirror(experiment.run_dir, say=self.say)
        self.directory = Path(experiment.run_dir) if self._mirror is None else self._mirror.folder
        self.shared = self._mirror is None or jax.process_count() == 1
        """Whether all processes of the run use the same directory."""
        self.config_json = experiment.to_json()
        self._experiment = experiment
        self._writes = is_first()
        self._progress = Progress(steps=training.steps, every=training.log_every, stream=stream)
        self._before: dict[str, Any] | None = None
        self._lock: Lock | None = None
        self._writer: MetricsWriter | None = None
        if self._writes and "wandb" in experiment.log:
            import_wandb()  # Fails before any file is written.

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is not None:
            self._writer.close(failed=kind is not None)
        if self._lock is not None:
            self._lock.release()
        if self._mirror is None:
            return
        if kind is not None:  # The others may have failed, too, or wait for this process.
            self._mirror.close()
            return
        try:
            with together():
                if not self._writes:
                    self._mirror.close()
        finally:  # The first process completes the checkpoints; until then no other one ends.
            with together():
                if self._writes:
                    self._mirror.close()

    def claim(self) -> None:
        """Creates the directory of a new run, or checks that it holds this run; locks it.

        Raises:
          ValueError: the directory holds another run or other files, another process writes to it,
            or it cannot be created; see `run_directory` and `lock`.
        """
        if not self._writes:
            return
        if self._mirror is not None:
            self._mirror.claim()
        # Checked before the first write: a directory with other files stays unchanged.
        if find_config(self.directory) is None:
            make_directory(self.directory)
        if self._mirror is None:
            self._lock = Lock(self.directory, say=self.say, whole=True)
        for name in ("config.json", "environment.json", "results.json", "metrics.jsonl"):
            remove_unfinished(self.directory / name)
        self._before = find_config(self.directory)
        if self._before is None:
            write_json(self.directory / "config.json", self.config_json)
            return
        may_change = [*WITHOUT_EFFECT, "training.steps"]
        if self._experiment.checkpoint.regroup != "refuse":
            may_change.append("training.memory.groups")
        read_experiment(self.directory)  # Refuses a run of another version.
        old = self._before
        decay = self.config_json["optimizer"]["decay_steps"]
        if old["optimizer"]["decay_steps"] is None and decay == old["training"]["steps"]:
            may_change.append("optimizer.decay_steps")  # The schedule that the run began with.
        refuse_changes(self.directory, old, self.config_json, may_change=may_change)

    def follow(self) -> None:
        """Fills the folders of the other processes, once the first one has claimed the run."""
        if self._mirror is not None and not self._writes:
            self._mirror.claim()

    def old_results(self) -> dict[str, Any] | None:
        """The results of a run that has already done all its steps; None if it has not."""
        path = self.directory / "results.json"
        results = read_json(path) if path.is_file() else {}
        return results if results.get("steps") == self._experiment.training.steps else None

    def begin(self, step: int) -> None:
        """Opens the records for a session that starts after `step`."""
        self.check_held()
        if not self._writes:
            return
        if self._before is not None:
            write_json(self.directory / "config.json", self.config_json)
            self._say_resumed(self._before["training"]["steps"], step)
        record_session(self.directory, fingerprint=self._experiment.fingerprint, step=step)
        every = self._experiment.training.log_every
        sinks: list[Sink] = []
        # First, so that leaving the context closes what of the rest is open.
        self._writer = MetricsWriter(self.directory, step=step, every=every, sinks=sinks)
        for name in self._experiment.log:
            if name == "tensorboard":
                try:
                    sinks.append(TensorBoard(self.directory, step=step))
                except ModuleNotFoundError as error:
                    self.say(
                        f"Metrics go to metrics.jsonl alone, not to TensorBoard ({error}; "
                        "pip install -e '.[tensorboard]')."
                    )
            else:
                sinks.append(WeightsAndBiases(self.directory, config=self.config_json))

    def _say_resumed(self, old_steps: int, step: int) -> None:
        steps = self._experiment.training.steps
        self.say(f"Resuming {self.name} at step {step}.")
        if old_steps != steps and self._experiment.optimizer.decay_steps is None:
            self.say(
                f"training.steps went from {old_steps} to {steps}: the learning rate "
                f"now decays until step {steps} (--optimizer.decay_steps {old_steps} keeps the "
                "schedule as it was)."
            )

    def say(self, message: str) -> None:
        """Prints a message on a separate line."""
        if self._writes:
            self._progress.say(message)

    def check_held(self) -> None:
        """Call it before each write into the run's directory.

        Raises:
          LostLockError: the lock is gone, and another session may use the directory.
        """
        if self._lock is not None:
            self._lock.check()
        if self._mirror is not None:
            self._mirror.check(ask=False)

    def record(
        self, step: int, values: Mapping[str, float], *, seconds_per_step: float, event: bool
    ) -> None:
        """Writes a step's record and shows its line; see `MetricsWriter.write`."""
        self.check_held()
        if self._writer is not None:
            self._writer.write(step, values, event=event)
            self._progress.show(step, values, seconds_per_step=seconds_per_step)

    def finish(self, results: Mapping[str, Any]) -> None:
        """Writes `results.json`."""
        self.check_held()
        if self._writes:
            write_json(self.directory / "results.json", results)


def _mirror(run_dir: str, *, say: Callable[[str], None]) -> Mirror | None:
    """The folder that stands for a run in a bucket; None for a run of this machine."""
    if scheme_of(run_dir) is None:
        return None
    session = from_first(secrets.token_hex(8))
    part = Part(jax.process_index(), jax.process_count(), session)
    return Mirror(run_dir, say=say, part=part)
