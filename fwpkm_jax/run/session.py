"""One training session: records, validation, checkpoints, clean stop on a signal."""

import itertools
import math
import signal
import time
from typing import Any, Literal, NamedTuple, NoReturn

import jax
from flax import nnx

from fwpkm_jax.io.status_line import format_duration
from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.log import RunLog
from fwpkm_jax.run.setup import Setup
from fwpkm_jax.training.averages import ema_names, ema_weights, gradient_weights
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.diagnosis import NonFiniteError, diagnose
from fwpkm_jax.training.fit import Hooks, Report, fit
from fwpkm_jax.training.micro_batches import Batch
from fwpkm_jax.training.runs.processes import from_first, is_first, together
from fwpkm_jax.training.runs.profiler import Profiler
from fwpkm_jax.training.runs.progress import Speedometer
from fwpkm_jax.training.runs.signals import Stopped, StopSignals
from fwpkm_jax.training.sharding import on_one_device
from fwpkm_jax.training.state import TrainState, named_leaves
from fwpkm_jax.training.trained import describe_trained
from fwpkm_jax.training.validation import Validation


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


class Session:
    """One session of a run; `run` trains it to its end or to a signal.

    Args:
      setup: the run's parts.
      log: the run's log; the directory is claimed.
      checkpoints: the run's checkpoints.
      signals: reports whether a signal to stop came.
      validate: computes the validation's metrics; None: no validation.
      batches: the iterator over training batches; checkpoints save its position.
      about: a line on the validation; None: none.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        log: RunLog,
        checkpoints: Checkpoints,
        signals: StopSignals,
        validate: Validation | None,
        batches: Any,
        about: str | None,
    ) -> None:
        self._setup, self._log = setup, log
        self._checkpoints, self._signals = checkpoints, signals
        self._validate, self._batches, self._about = validate, batches, about
        config = setup.experiment.training
        self._tokens_per_step = config.batch_size * setup.experiment.data.length
        self._speed = Speedometer()
        self._compile_seconds = 0.0
        self._best_loss = parts.best_loss(checkpoints)
        self._loss = math.nan
        """Loss of the newest step whose metrics were read, in nats."""
        self._validation: dict[str, float] = {}
        """Metrics of the newest validation."""
        self._stop: signal.Signals | None = None
        """The signal to stop that was found at the newest pause; None if there was none."""

    def run(self) -> TrainResult:
        """Restores the newest state, trains to the last step and writes the results."""
        log, steps = self._log, self._setup.experiment.training.steps
        state = parts.restore_state(self._setup, self._checkpoints, self._batches, say=log.say)
        start = 0 if state is None else int(state.step)
        if start == steps and (results := from_first(log.old_results())):
            log.say(
                f"{log.name} has finished its {start} steps; raise training.steps to continue it, "
                "or choose another --run_dir."
            )
            return TrainResult("finished", start, state, results, None)
        with together():
            log.begin(start)
        if self._validate is not None and self._about:
            log.say(self._about)
        train = self._setup.experiment.optimizer.train
        if said := describe_trained(self._setup.shapes.params, train):
            log.say(said)
        if start < steps:
            ended = self._train(state, start)
            if ended.signal is not None:
                return ended
            state = ended.state
        # If no step was left, an earlier session was killed after its last checkpoint, before
        # results.
        assert state is not None
        self._checkpoints.wait()
        results = self._results(state)
        with together():
            log.finish(results)
        log.say(
            f"Finished {steps} steps; this session trained {self._speed.total_steps} in "
            f"{format_duration(self._speed.total_seconds)}. Results: {log.name}/results.json"
        )
        return TrainResult("finished", steps, state, results, None)

    def _train(self, state: TrainState | None, start: int) -> TrainResult:
        """Compiles the step and takes those that are left; the results are still to be written."""
        setup, log, steps = self._setup, self._log, self._setup.experiment.training.steps
        try:
            with self._signals.nothing_to_save():
                state = parts.new_state(setup, self._checkpoints) if state is None else state
                first = setup.put(next(self._batches))
                log.say("Compiling the training step ...")
                began = time.perf_counter()
                step = parts.compile_step(setup, state, first)
                self._compile_seconds = time.perf_counter() - began
        except Stopped as stop:
            log.say(
                f"{stop.signal.name}: stopped {log.name} before the first step of this "
                f"session; {start} steps are done. The same command continues it."
            )
            return TrainResult("interrupted", start, state, {}, stop.signal)
        log.say(f"Compiled the training step in {self._compile_seconds:.1f} s.")
        profiled = setup.experiment.profile if is_first() else None
        batches = itertools.chain([first], map(setup.put, self._batches))
        hooks: Hooks[TrainState, Batch] = Hooks(
            check=self._check_metrics,
            on_metrics=self._record,
            pause_after=self._pauses_after,
            measure=self._measure,
            on_pause=self._save,
        )
        with Profiler(
            log.directory / "profile", start=start, steps=profiled, say=log.say
        ) as self._profiler:
            fitted = fit(step, state, batches, hooks, start=start, steps=steps)
        if not fitted.stopped:
            return TrainResult("finished", steps, fitted.state, {}, None)
        assert self._stop is not None
        self._checkpoints.wait()
        log.say(f"{self._stop.name}: saved {log.name} at step {fitted.step} and stopped.")
        return TrainResult("interrupted", fitted.step, fitted.state, {}, self._stop)

    def _results(self, state: TrainState) -> dict[str, Any]:
        """The content of `results.json`."""
        return {
            "fingerprint": self._setup.experiment.fingerprint,
            "steps": int(state.step),
            "loss": self._loss if math.isfinite(self._loss) else None,
            "validation": self._validation,
            "best_validation_loss": self._best_loss if math.isfinite(self._best_loss) else None,
            "parameters": _size(state.params),
            "memory_parameters": _size(state.memory),
            "session": {
                "steps": self._speed.total_steps,
                "compile_seconds": self._compile_seconds,
                "train_seconds": self._speed.total_seconds,
            },
        }

    def _check_metrics(self, report: Report[Batch], state: TrainState) -> None:
        """Raises NonFiniteError if a metric is not finite."""
        # jit returns metrics sorted by name; the error should name the loss first.
        values = report.metrics
        bad = [n for n in ("loss", *values) if not math.isfinite(values[n])]
        if bad:
            self._fail(f"{bad[0]} is {values[bad[0]]}", report, state)
        self._loss = values["loss"]

    def _pauses_after(self, step: int) -> bool:
        """Whether the loop waits for this step in order to save, validate or stop."""
        stop = self._signals.poll()  # All processes ask at every step.
        return stop is not None or self._saves_after(step) or self._validates_after(step)

    def _saves_after(self, step: int) -> bool:
        experiment = self._setup.experiment
        return step == experiment.training.steps or step % experiment.checkpoint.every == 0

    def _validates_after(self, step: int) -> bool:
        config = self._setup.experiment.training
        every = config.validate_every
        return self._validate is not None and (
            step == config.steps or (every is not None and step % every == 0)
        )

    def _measure(self, report: Report[Batch], state: TrainState) -> dict[str, float]:
        """The metrics of a validation if it is due.

        Also checks that all weights are finite before they are saved. The loss does not show NaN in
        slots that no token read.
        """
        if non_finite_leaves((state.params, state.opt_state, state.memory)):
            self._fail("a weight is not finite", report, state)
        if self._validate is None or not self._validates_after(report.step):
            return {}
        model = nnx.merge(self._setup.graphdef, state.params)
        self._validation = dict(self._validate(model, state.memory))
        if (config := self._setup.experiment.optimizer).ema is not None:
            names = ema_names(state.params, ema=config.ema, train=config.train)
            averages = ema_weights(state.params, named_leaves(state.opt_state), names)
            model = nnx.merge(self._setup.graphdef, averages)
            measured = self._validate(model, model.restart(state.memory))
            self._validation |= {f"ema_{name}": value for name, value in measured.items()}
        return {f"valid/{name}": value for name, value in self._validation.items()}

    def _record(self, report: Report[Batch], state: TrainState) -> None:
        """Writes a step's record and shows its line."""
        self._speed.step_done(report.seconds)
        self._profiler.step_done(report.step)
        seconds = self._speed.seconds_per_step
        values = {**report.metrics, "tokens_per_second": self._tokens_per_step / seconds}
        shown = [
            f"{name.removeprefix('valid/')} {value:.4f}"
            for name, value in report.metrics.items()
            if name.startswith("valid/")
        ]
        self._log.record(report.step, values, seconds_per_step=seconds, event=bool(shown))
        if shown:
            self._log.say(f"step {report.step} validation: {'  '.join(shown)}")

    def _save(self, report: Report[Batch], state: TrainState) -> bool:
        """Saves if a save is due, the validation is the best so far, or a signal came.

        Returns whether training stops before its last step.
        """
        validated = self._validates_after(report.step)
        loss = self._validation.get("loss", math.nan) if validated else math.nan
        improved = loss < self._best_loss
        if improved:
            self._best_loss = loss
        self._stop = self._signals.wait()
        if improved or self._stop is not None or self._saves_after(report.step):
            self._log.check_held()
            self._checkpoints.save(
                state,
                data_position=self._batches.get_state(),
                config=self._log.config_json,
                metrics=self._validation if math.isfinite(loss) else None,
            )
        return self._stop is not None and report.step < self._setup.experiment.training.steps

    def _fail(self, symptom: str, report: Report[Batch], state: TrainState) -> NoReturn:
        """Raises a NonFiniteError that names the first value found that is not finite."""
        setup = self._setup
        self._checkpoints.wait()
        # The failed step may have used windows in place of full attention.
        graphdef = setup.graphdef
        if setup.windowed is not None and report.metrics["windowed"]:
            graphdef = setup.windowed.graphdef
        # The search runs operation by operation on one device; every process repeats it.
        newest = int(state.step)
        config = setup.experiment.training
        at = gradient_weights(state.params, state.opt_state, setup.experiment.optimizer.train)
        cause = diagnose(
            graphdef,
            on_one_device(setup.partition, state._replace(params=at, opt_state=())),
            on_one_device(setup.partition, report.batch),
            clean_memory=jax.jit(lambda: setup.init().memory)(),
            micro_batches=config.micro_batches,
            memory=config.memory,
        )
        saved = self._checkpoints.steps
        good = f"{self._checkpoints.directory / str(saved[-1])}" if saved else "none was saved"
        step = report.step
        steps = f"step {step}" if newest == step else f"steps {step} to {newest}"
        raise NonFiniteError(
            f"Stopped in {steps}: {symptom} at step {step}. First fault found: {cause}. "
            f"Last good checkpoint: {good}. A lower optimizer.learning_rate, "
            "optimizer.clip_norm or other data may avoid it."
        )


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
