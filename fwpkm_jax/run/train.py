"""Trains a run from its configuration to its results; continues an interrupted run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import signal
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import jax

from fwpkm_jax.config import Experiment, read_experiment
from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.log import RunLog
from fwpkm_jax.run.session import Session
from fwpkm_jax.run.setup import Setup
from fwpkm_jax.status_line import format_duration
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.fit import fit
from fwpkm_jax.training.optimizer import MOMENTS
from fwpkm_jax.training.runs.processes import from_first, is_first, together
from fwpkm_jax.training.runs.profiler import Profiler
from fwpkm_jax.training.runs.signals import Stopped, StopSignals
from fwpkm_jax.training.state import TrainState
from fwpkm_jax.training.trained import describe_trained
from fwpkm_jax.training.validation import Validation

logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """How a run ended."""

    status: Literal["finished", "interrupted"]
    """interrupted: a signal came; every finished step is saved."""
    step: int
    """Number of finished steps."""
    state: TrainState | None
    """The state after these steps; None if a signal came before the state was created."""
    results: dict[str, Any]
    """What `results.json` holds; empty if interrupted."""
    signal: signal.Signals | None
    """The signal that interrupted the run; None if it finished."""


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
        directory = log.directory / "checkpoints"
        with (
            StopSignals(say=log.say) as signals,
            Checkpoints(directory, experiment.checkpoint) as checkpoints,
        ):
            return _train(setup, log, checkpoints, signals, validate, batches, about)


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


def _train(
    setup: Setup,
    log: RunLog,
    checkpoints: Checkpoints,
    signals: StopSignals,
    validate: Validation | None,
    batches: Any,
    about_validation: str | None,
) -> TrainResult:
    """Runs one session; the directory is already claimed."""
    steps = setup.experiment.training.steps
    state = parts.restore_state(setup, checkpoints, batches, say=log.say)
    start = 0 if state is None else int(state.step)
    if start == steps and (results := from_first(log.old_results())):
        log.say(
            f"{log.name} has finished its {start} steps; raise training.steps to continue it, "
            "or choose another --run_dir."
        )
        return TrainResult("finished", start, state, results, None)
    with together():
        log.begin(start)
    if validate is not None and about_validation:
        log.say(about_validation)
    profiler = Profiler(
        log.directory / "profile",
        start=start,
        steps=setup.experiment.profile if is_first() else None,
        say=log.say,
    )
    if said := describe_trained(
        setup.shapes.params,
        setup.experiment.optimizer.train,
        setup.experiment.optimizer.precision,
        moments=MOMENTS[setup.experiment.optimizer.name],
    ):
        log.say(said)
    session = Session(
        setup,
        log=log,
        checkpoints=checkpoints,
        signals=signals,
        validate=validate,
        batches=batches,
        best_loss=parts.best_loss(checkpoints),
        profiler=profiler,
    )
    compile_seconds = 0.0
    if start < steps:
        try:
            with signals.nothing_to_save():
                state = parts.new_state(setup, checkpoints) if state is None else state
                first = setup.put(next(batches))
                log.say("Compiling the training step ...")
                began = time.perf_counter()
                step = parts.compile_step(setup, state, first)
                compile_seconds = time.perf_counter() - began
        except Stopped as stop:
            log.say(
                f"{stop.signal.name}: stopped {log.name} before the first step of this "
                f"session; {start} steps are done. The same command continues it."
            )
            return TrainResult("interrupted", start, state, {}, stop.signal)
        log.say(f"Compiled the training step in {compile_seconds:.1f} s.")
        all_batches = itertools.chain([first], map(setup.put, batches))
        with profiler:
            fitted = fit(step, state, all_batches, session.hooks(), start=start, steps=steps)
        state = fitted.state
        if fitted.stopped:
            assert session.stop is not None
            checkpoints.wait()
            where = f"{log.name} at step {fitted.step}"
            log.say(f"{session.stop.name}: saved {where} and stopped.")
            return TrainResult("interrupted", fitted.step, state, {}, session.stop)
    # If no step was left, an earlier session was killed after its last checkpoint, before results.
    assert state is not None
    checkpoints.wait()
    results = _results(setup, state, session, compile_seconds)
    with together():
        log.finish(results)
    speed = session.speed
    log.say(
        f"Finished {steps} steps; this session trained {speed.total_steps} in "
        f"{format_duration(speed.total_seconds)}. Results: {log.name}/results.json"
    )
    return TrainResult("finished", steps, state, results, None)


def _results(
    setup: Setup, state: TrainState, session: Session, compile_seconds: float
) -> dict[str, Any]:
    """The content of `results.json`."""
    return {
        "fingerprint": setup.experiment.fingerprint,
        "steps": int(state.step),
        "loss": session.loss if math.isfinite(session.loss) else None,
        "validation": session.validation,
        "best_validation_loss": session.best_loss if math.isfinite(session.best_loss) else None,
        "parameters": _size(state.params),
        "memory_parameters": _size(state.memory),
        "session": {
            "steps": session.speed.total_steps,
            "compile_seconds": compile_seconds,
            "train_seconds": session.speed.total_seconds,
        },
    }


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
