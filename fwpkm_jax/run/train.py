"""Trains a run from its configuration to its results; continues an interrupted run."""

import contextlib
import dataclasses
from pathlib import Path
from typing import TextIO

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.log import RunLog
from fwpkm_jax.run.session import Session, TrainResult
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.runs.processes import together
from fwpkm_jax.training.runs.signals import StopSignals
from fwpkm_jax.training.validation import Validation


def train(
    experiment: Experiment, *, validate: Validation | None = None, stream: TextIO | None = None
) -> TrainResult:
    """Trains or continues the run in `experiment.run_dir`, and writes all its files there.

    The loop itself is `fwpkm_jax.training.fit.fit`. This function gives it the step that the
    configuration describes, and hooks that record, validate, save and stop.

    Args:
      experiment: the configuration.
      validate: called every `training.validate_every` steps and at the end; None: the loss of the
        data's held-out split.
      stream: where progress is printed; None: standard output.

    Returns:
      How the run ended. A finished run is not changed.

    Raises:
      ValueError: fields of the configuration contradict each other, or the directory cannot be
        used: it holds another run, another process uses it, or it cannot be created.
      NonFiniteError: a loss, gradient or weight became NaN or infinite; the error names the first.
      DamagedCheckpointError: the run has checkpoints, but none can be read.
      OtherProcessError: another process of the run failed.

    Example:
      >>> from dataclasses import replace
      >>> from fwpkm_jax import load_config, train
      >>> experiment = replace(load_config("recall"), run_dir="runs/mine")
      >>> result = train(experiment)  # doctest: +SKIP
      >>> result.step  # doctest: +SKIP
      600
    """
    with together():
        setup = parts.make_setup(experiment)
        about = None if validate else experiment.data.validates_on
        validate = validate or parts.default_validation(setup)
        batches = parts.batches_of(setup, "train")
    with contextlib.closing(batches), RunLog(experiment, stream=stream) as log:
        with together():
            log.claim()
        with together():
            log.follow()
        directory = log.directory / "checkpoints"
        with (
            StopSignals(say=log.say) as signals,
            Checkpoints(directory, experiment.checkpoint, shared=log.shared) as checkpoints,
        ):
            session = Session(
                setup,
                log=log,
                checkpoints=checkpoints,
                signals=signals,
                validate=validate,
                batches=batches,
                about=about,
            )
            return session.run()


def resume_experiment(run_dir: str | Path) -> Experiment:
    """The configuration with which the run in a directory continues.

    `train(resume_experiment(run_dir))` continues from the newest checkpoint. To train a finished
    run further, raise `training.steps` with `dataclasses.replace`. The directory may have moved
    since the run began.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the run's configuration cannot be read.
    """
    return dataclasses.replace(read_experiment(run_dir), run_dir=str(run_dir))
