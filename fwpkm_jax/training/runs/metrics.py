"""Writes a run's metrics: always to `metrics.jsonl`, on request to TensorBoard and W&B."""

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.io.atomic import open_own, own_folder, replacing, write_text
from fwpkm_jax.io.untrusted import OutsideFileError, bounded_lines, parse_json, read_text

logger = logging.getLogger(__name__)


def truncate_metrics(path: Path, *, step: int) -> None:
    """Drops the records after `step`, and lines that are cut off or damaged.

    The steps after the checkpoint are trained again, so their records are written again.
    """
    try:
        number = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    with os.fdopen(number, "rb") as old, replacing(path) as new:
        for number, line in enumerate(bounded_lines(old, path), start=1):
            record_step = _record_step(line, path)
            if record_step is None:
                logger.warning("Leaving out line %d of %s, which is no record.", number, path)
            elif record_step <= step:
                new.write(line.rstrip(b"\n") + b"\n")


def _record_step(line: bytes, path: Path) -> int | None:
    """The step of a line of `metrics.jsonl`; None if the line is not a valid record."""
    try:
        step = parse_json(line, path, kind=dict).get("step")
    except OutsideFileError:
        return None
    return step if isinstance(step, int) else None


class TensorBoard:
    """Event files in `RUN/tensorboard`, starting with the step after `step`.

    Raises:
      ModuleNotFoundError: tensorboardX (extra `tensorboard`) is not installed.
    """

    def __init__(self, directory: Path, *, step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.summary import scalar

        # Protobuf creates these classes at import, so type checkers do not see them.
        self._event: Any = vars(event_pb2)["Event"]
        self._summary: Any = vars(summary_pb2)["Summary"]
        self._scalar = scalar
        session: Any = vars(event_pb2)["SessionLog"]
        folder = own_folder(directory / "tensorboard")
        # Not tensorboardX's SummaryWriter: if the disk is full, its thread dies, and the next write
        # then blocks for ever.
        # A name that nobody can have taken: tensorboardX would write through a link.
        self._events = EventsWriter(str(folder / "events"), f".{secrets.token_hex(8)}")
        # TensorBoard hides the events of earlier sessions from this step on.
        start = session(status=session.START)
        self._add(self._event(step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one event with a scalar for each value."""
        scalars = [self._scalar(n, v).value[0] for n, v in values.items()]
        self._add(self._event(step=step, summary=self._summary(value=scalars)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._events.write_event(event)

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._events.close()


def import_wandb() -> Any:
    """The module wandb, which is imported only for runs that use it.

    Raises:
      ValueError: it is not installed.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"--log wandb needs the package wandb ({error}); install it with `pip install wandb`, "
            "or leave wandb out of --log."
        ) from error
    return wandb


class WeightsAndBiases:
    """A run on Weights & Biases; all sessions of a run directory belong to the same one.

    The id of the run is stored in `RUN/wandb_id.txt`. The project is `WANDB_PROJECT` or
    `fwpkm_jax`; wandb's other environment variables work as usual, such as `WANDB_MODE=offline`.

    Args:
      directory: the run directory.
      config: the experiment as JSON.

    Raises:
      ValueError: wandb does not start, for example without a login or a network.
    """

    def __init__(self, directory: Path, *, config: Mapping[str, Any]) -> None:
        wandb = import_wandb()
        own_folder(directory / "wandb")
        identity = directory / "wandb_id.txt"
        if not identity.is_file():
            write_text(identity, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fwpkm_jax"),
                name=directory.name,
                dir=str(directory),
                config=dict(config),
                id=read_text(identity, most=1000).strip(),
                resume="allow",
            )
        except Exception as error:  # wandb has many error classes of its own.
            raise ValueError(
                f"Weights & Biases did not start ({' '.join(str(error).split())}); log in with "
                "`wandb login`, set WANDB_MODE=offline, or leave wandb out of --log."
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends one step's values.

        After a killed session some steps are trained again, with the same values; wandb ignores
        the steps that it already has.
        """
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """Sends what is left and marks the run as finished or failed."""
        self._run.finish(exit_code=int(failed))


Sink = TensorBoard | WeightsAndBiases


class MetricsWriter:
    """Writes `metrics.jsonl`, one object per step, and sends every few steps to sinks.

    Args:
      directory: the run directory.
      step: the step that the session starts from; records of later steps are dropped.
      every: steps between two events for the sinks.
      sinks: where events go.
    """

    def __init__(self, directory: Path, *, step: int, every: int, sinks: Sequence[Sink]) -> None:
        truncate_metrics(directory / "metrics.jsonl", step=step)
        number = open_own(directory / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(number, "a")
        self._every = every
        self._sinks = sinks

    def close(self, *, failed: bool = False) -> None:
        """Closes the file and all sinks; `failed` if an error ended the session."""
        self._file.close()
        for sink in self._sinks:
            sink.close(failed=failed)

    def write(self, step: int, values: Mapping[str, float], *, event: bool = False) -> None:
        """Appends one step's record.

        Args:
          step: the step that the values belong to. Write each step once, in order.
          values: by name. A value that is not finite becomes null: JSON has no NaN.
          event: sends the values to the sinks even if `every` does not divide the step.
        """
        record = {n: float(v) if np.isfinite(v) else None for n, v in values.items()}
        self._file.write(json.dumps({"step": step, **record}, allow_nan=False) + "\n")
        # Flushed lines survive if the process is killed.
        self._file.flush()
        if event or step % self._every == 0:
            for sink in self._sinks:
                sink.write(step, values)
