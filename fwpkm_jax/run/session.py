"""The hooks of one training session: records, validation, checkpoints, clean stop on a signal."""

from __future__ import annotations

import math
import signal
from typing import Any, NoReturn

import jax
from flax import nnx

from fwpkm_jax.run.log import RunLog
from fwpkm_jax.run.setup import Setup
from fwpkm_jax.training.averages import ema_names, ema_weights, gradient_weights
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.diagnosis import NonFiniteError, diagnose
from fwpkm_jax.training.fit import Hooks, Report
from fwpkm_jax.training.micro_batches import Batch
from fwpkm_jax.training.runs.profiler import Profiler
from fwpkm_jax.training.runs.progress import Speedometer
from fwpkm_jax.training.runs.signals import StopSignals
from fwpkm_jax.training.sharding import on_one_device
from fwpkm_jax.training.state import TrainState
from fwpkm_jax.training.validation import Validation


class Session:
    """The hooks of one session, and its losses and speed so far.

    Args:
      setup: the run's parts.
      log: the run's log.
      checkpoints: the run's checkpoints.
      signals: reports whether a signal to stop came.
      validate: computes the validation's metrics; None: no validation.
      batches: the iterator over training batches; checkpoints save its position.
      best_loss: the lowest validation loss of earlier sessions.
      profiler: notified of each step.
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
        best_loss: float,
        profiler: Profiler,
    ) -> None:
        self._setup, self._log = setup, log
        self._checkpoints, self._signals = checkpoints, signals
        self._validate, self._batches = validate, batches
        self._profiler = profiler
        config = setup.experiment.training
        self._tokens_per_step = config.batch_size * setup.experiment.data.length
        self.speed = Speedometer()
        self.best_loss = best_loss
        self.loss = math.nan
        """Loss of the newest step whose metrics were read, in nats."""
        self.validation: dict[str, float] = {}
        """Metrics of the newest validation."""
        self.stop: signal.Signals | None = None
        """The signal to stop that was found at the newest pause; None if there was none."""

    def hooks(self) -> Hooks[TrainState, Batch]:
        """The functions that `fit` calls."""
        return Hooks(
            check=self._check_metrics,
            on_metrics=self._record,
            pause_after=self._pauses_after,
            measure=self._measure,
            on_pause=self._save,
        )

    def _check_metrics(self, report: Report[Batch], state: TrainState) -> None:
        """Raises NonFiniteError if a metric is not finite."""
        # jit returns metrics sorted by name; the error should name the loss first.
        values = report.metrics
        bad = [n for n in ("loss", *values) if not math.isfinite(values[n])]
        if bad:
            self._fail(f"{bad[0]} is {values[bad[0]]}", report, state)
        self.loss = values["loss"]

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
        self.validation = dict(self._validate(model, state.memory))
        if (config := self._setup.experiment.optimizer).ema is not None:
            names = ema_names(state.params, ema=config.ema, train=config.train)
            averages = ema_weights(state.params, state.opt_state, names)
            model = nnx.merge(self._setup.graphdef, averages)
            measured = self._validate(model, state.memory)
            self.validation |= {f"ema_{name}": value for name, value in measured.items()}
        return {f"valid/{name}": value for name, value in self.validation.items()}

    def _record(self, report: Report[Batch], state: TrainState) -> None:
        """Writes a step's record and shows its line."""
        del state
        self.speed.step_done(report.seconds)
        self._profiler.step_done(report.step)
        seconds = self.speed.seconds_per_step
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
        loss = self.validation.get("loss", math.nan) if validated else math.nan
        improved = loss < self.best_loss
        if improved:
            self.best_loss = loss
        self.stop = self._signals.wait()
        if improved or self.stop is not None or self._saves_after(report.step):
            self._log.check_held()
            self._checkpoints.save(
                state,
                data_position=self._batches.get_state(),
                config=self._log.config_json,
                metrics=self.validation if math.isfinite(loss) else None,
            )
        return self.stop is not None and report.step < self._setup.experiment.training.steps

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
