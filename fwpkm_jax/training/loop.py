"""The training loop: a run from its configuration to its results, resumed where it was left."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TextIO

import jax
from flax import nnx

from fwpkm_jax.data import make_dataset, vocab_size
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.checkpoints.restore import read_metrics
from fwpkm_jax.training.diagnosis import NonFiniteError, diagnose
from fwpkm_jax.training.limited import limited_attention
from fwpkm_jax.training.micro_batches import Batch
from fwpkm_jax.training.optimizer import learning_rate_schedule, make_optimizer
from fwpkm_jax.training.runs.processes import from_first, together
from fwpkm_jax.training.runs.progress import Speedometer, format_duration
from fwpkm_jax.training.runs.run_log import RunLog
from fwpkm_jax.training.runs.signals import StopSignals
from fwpkm_jax.training.sharding import (
    check_mesh,
    make_partition,
    on_one_device,
    process_rows,
    put_batch,
    state_shardings,
)
from fwpkm_jax.training.state import TrainState, init_state, model_graph
from fwpkm_jax.training.step import Metrics, make_train_step
from fwpkm_jax.training.validation import Validation, make_validation

if TYPE_CHECKING:
    from fwpkm_jax.config import Experiment


class TrainResult(NamedTuple):
    """How a run ended."""

    status: Literal["finished", "interrupted"]
    """interrupted: a signal came, and the run was saved at `step`."""
    step: int
    """Steps done."""
    state: TrainState
    """The state after them."""
    results: dict[str, Any]
    """What `results.json` holds; empty if interrupted."""
    signal: signal.Signals | None
    """The signal that interrupted the run."""


def train(
    experiment: Experiment, *, validate: Validation | None = None, stream: TextIO | None = None
) -> TrainResult:
    """Trains, or continues, the run in `experiment.run_dir` and writes everything about it there.

    Args:
      experiment: the configuration.
      validate: called every `training.validate_every` steps and at the end; default the loss of
        the data's held-out split.
      stream: where progress is printed; default standard output.

    Returns:
      How the run ended. A run that has finished before is left as it is.

    Raises:
      ValueError: the configuration does not fit together, or the directory holds another run.
      NonFiniteError: a loss, gradient or weight stopped being finite; what went first is named.
      DamagedCheckpointError: the run has checkpoints but none can be read.
      OtherProcessError: of many processes another one failed.
    """
    with together():
        session = _Run(experiment, validate=validate, stream=stream)
    return session.run()


class _Pending(NamedTuple):
    """A step whose metrics are still on the device."""

    step: int
    batch: Batch
    metrics: Metrics


class _Run:
    """One session of a run."""

    def __init__(
        self, experiment: Experiment, *, validate: Validation | None, stream: TextIO | None
    ) -> None:
        config = experiment.training
        needed = vocab_size(experiment.data)
        if experiment.model.vocab_size < needed:
            raise ValueError(
                f"model.vocab_size={experiment.model.vocab_size} is smaller than the data's "
                f"{needed} tokens; raise it to {needed}."
            )
        self.experiment, self.config = experiment, config
        check_mesh(experiment)
        self.partition = make_partition(experiment.mesh)
        self.log = RunLog(experiment, stream=stream)
        self.graphdef = model_graph(experiment.model)
        self.limited = limited_attention(experiment.model, config.window_probability)
        self.optimizer = make_optimizer(experiment.optimizer, steps=config.steps)
        self.init = partial(
            init_state,
            experiment.model,
            memory=config.memory,
            optimizer=self.optimizer,
            seed=experiment.seed,
        )
        self.validate = validate or self._default_validation()
        self.batches: Any = iter(self._dataset("train"))

    def _dataset(self, split: Literal["train", "valid"]) -> Any:
        return make_dataset(
            self.experiment.data,
            split=split,
            batch_size=self.config.batch_size,
            seed=self.experiment.seed,
            rows=process_rows(self.partition, self.config.batch_size),
        )

    def _default_validation(self) -> Validation | None:
        count = self.config.validation_batches
        if not count:
            return None
        with contextlib.closing(iter(self._dataset("valid"))) as held_out:
            batches = list(itertools.islice(held_out, count))
        if not batches:
            raise ValueError(
                f"The data's valid split gives no batch of batch_size={self.config.batch_size}; "
                "enlarge it, or turn validation off with training.validation_batches=0."
            )
        return make_validation(
            batches,
            memory=self.config.memory,
            micro_batches=self.config.micro_batches,
            partition=self.partition,
        )

    def run(self) -> TrainResult:
        """The session, from claiming the directory to the results."""
        with together():
            self.log.claim()
        with (
            contextlib.closing(self.batches),
            self.log,
            StopSignals() as self.signals,
            self._checkpoints() as self.checkpoints,
        ):
            state, start = self._restore()
            if start == self.config.steps and (results := from_first(self.log.old_results())):
                self.log.say(
                    f"{self.log.directory} has finished its {start} steps; raise training.steps to "
                    "continue it, or choose another --run_dir."
                )
                return TrainResult("finished", start, state, results, None)
            with together():
                self.log.begin(start)
            return self._train(state, start)

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.log.directory / "checkpoints", self.experiment.checkpoint)

    def _restore(self) -> tuple[TrainState, int]:
        """The newest checkpoint's state and step, data position included, or the start."""
        shapes = jax.eval_shape(self.init)
        layout = self._layout(shapes)
        self.log.say(self.checkpoints.describe(shapes))
        restored = self.checkpoints.restore_newest(shapes, layout)
        if restored is None:
            return jax.jit(self.init, out_shardings=layout)(), 0
        if restored.data_position is not None:  # None: weights that came from elsewhere.
            self.batches.set_state(restored.data_position)
        step = int(restored.state.step)
        if step > self.config.steps:
            raise ValueError(
                f"training.steps={self.config.steps}, but {self.log.directory} has {step} steps "
                "done; raise training.steps or choose another --run_dir."
            )
        state = restored.state
        if shapes.memory and not state.memory:
            self.log.say(f"The checkpoint of step {step} holds no memories; they start afresh.")
            fresh = jax.jit(lambda: self.init().memory, out_shardings=layout and layout.memory)
            state = state._replace(memory=fresh())
        return state, step

    def _layout(self, shapes: TrainState) -> TrainState | None:
        """Where the state's arrays lie, None for all on the one device."""
        if self.partition is None:
            return None
        return state_shardings(
            self.partition, shapes, graphdef=self.graphdef, optimizer=self.optimizer
        )

    def _train(self, state: TrainState, start: int) -> TrainResult:
        """Steps until the last one or a signal."""
        self.best_loss = self._best_loss()
        self.validation: dict[str, float] = {}
        self.loss = math.nan
        self.compile_seconds = 0.0
        self.speed = Speedometer()
        if start == self.config.steps:  # Killed between its last checkpoint and its results.
            return self._finished(state)
        first = next(self.batches)
        self.tokens_per_step = self.config.batch_size * self.experiment.data.length
        compiled = self._compile(state, first)
        self.speed.resume()
        pending: _Pending | None = None
        for step in range(start + 1, self.config.steps + 1):
            batch = first if step == start + 1 else next(self.batches)
            state, metrics = compiled(state, self._put(batch))
            if pending is not None:
                # The step is under way; meanwhile the metrics of the one before it are read.
                self._record(pending, self._read(pending, state))
            pending = _Pending(step, batch, metrics)
            stop = self.signals.poll()
            if stop is not None or self._pauses_after(step):
                stop = self._pause(pending, state)
                pending = None
                self.speed.resume()
            if stop is not None and step < self.config.steps:
                self.checkpoints.wait()
                where = f"{self.log.directory} at step {step}"
                self.log.say(f"{stop.name}: saved {where} and stopped.")
                return TrainResult("interrupted", step, state, {}, stop)
        return self._finished(state)

    def _compile(self, state: TrainState, batch: Batch) -> Any:
        """The compiled step; its time is reported apart from the training's."""
        step = make_train_step(
            self.graphdef,
            self.optimizer,
            schedule=learning_rate_schedule(self.experiment.optimizer, steps=self.config.steps),
            micro_batches=self.config.micro_batches,
            memory=self.config.memory,
            limited=self.limited,
            loss_block=self.config.loss_block,
            remat=self.config.remat,
            partition=self.partition,
        )
        began = time.perf_counter()
        compiled = step.lower(state, self._put(batch)).compile()
        self.compile_seconds = time.perf_counter() - began
        self.log.say(f"Compiled the training step in {self.compile_seconds:.1f} s.")
        return compiled

    def _put(self, batch: Batch) -> Batch:
        return put_batch(self.partition, batch)

    def _pauses_after(self, step: int) -> bool:
        """Whether the loop waits for this step, to save or to validate."""
        return (
            step == self.config.steps
            or step % self.experiment.checkpoint.every == 0
            or self._validates_after(step)
        )

    def _validates_after(self, step: int) -> bool:
        every = self.config.validate_every
        return self.validate is not None and (
            step == self.config.steps or (every is not None and step % every == 0)
        )

    def _pause(self, pending: _Pending, state: TrainState) -> signal.Signals | None:
        """Waits for a step, then validates and saves as its turn is, or as a signal asks."""
        values = self._read(pending, state)
        self._check_weights(pending, state)
        metrics: dict[str, float] = {}
        if self.validate is not None and self._validates_after(pending.step):
            metrics = dict(self.validate(nnx.merge(self.graphdef, state.params), state.memory))
            self.validation = metrics
            values |= {f"valid/{name}": value for name, value in metrics.items()}
        self._record(pending, values, event=bool(metrics))
        if metrics:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            self.log.say(f"step {pending.step} validation: {shown}")
        loss = metrics.get("loss", math.nan)
        improved = loss < self.best_loss
        if improved:
            self.best_loss = loss
        stop = self.signals.wait()
        # A validation that is not the best so far is no reason of its own to save.
        last = pending.step == self.config.steps or stop is not None
        if improved or last or pending.step % self.experiment.checkpoint.every == 0:
            self.checkpoints.save(
                state,
                data_position=self.batches.get_state(),
                config=self.log.config_json,
                metrics=metrics if math.isfinite(loss) else None,
            )
        return stop

    def _read(self, pending: _Pending, state: TrainState) -> dict[str, float]:
        """The metrics of a step, once they are finite; `state` is the newest there is."""
        values = {name: float(x) for name, x in jax.device_get(pending.metrics).items()}
        self.speed.step_done()
        # jit returns metrics in the order of their names; the loss is the one to speak of.
        bad = [n for n in ("loss", *values) if not math.isfinite(values[n])]
        if bad:
            self._fail(f"{bad[0]} is {values[bad[0]]}", pending, state)
        self.loss = values["loss"]
        return values

    def _check_weights(self, pending: _Pending, state: TrainState) -> None:
        """Makes sure that nothing but finite numbers is saved, slots nobody reads included."""
        bad = non_finite_leaves((state.params, state.opt_state, state.memory))
        if bad:
            self._fail("a weight is not finite", pending, state)

    def _fail(self, symptom: str, pending: _Pending, state: TrainState) -> NoReturn:
        self.checkpoints.wait()
        # The step that failed may be one that saw only the window.
        graphdef = self.graphdef
        if self.limited is not None and pending.metrics["limited"]:
            graphdef = self.limited.graphdef
        # The search goes op by op, on one device; of many processes each does the same.
        newest = int(state.step)
        state = on_one_device(self.partition, state._replace(opt_state=()))
        cause = diagnose(
            graphdef,
            state,
            on_one_device(self.partition, self._put(pending.batch)),
            clean_memory=jax.jit(lambda: self.init().memory)(),
            micro_batches=self.config.micro_batches,
            memory=self.config.memory,
        )
        saved = self.checkpoints.steps
        good = f"{self.checkpoints.directory / str(saved[-1])}" if saved else "none was saved"
        step = pending.step
        steps = f"step {step}" if newest == step else f"steps {step} to {newest}"
        raise NonFiniteError(
            f"Stopped in {steps}: {symptom} at step {step}. What went first: {cause}. "
            f"Last good checkpoint: {good}. A lower optimizer.learning_rate, "
            "optimizer.clip_norm or other data may avoid it."
        )

    def _record(
        self, pending: _Pending, values: Mapping[str, float], *, event: bool = False
    ) -> None:
        """Writes a step's record and shows its line."""
        seconds = self.speed.seconds_per_step
        values = {**values, "tokens_per_second": self.tokens_per_step / seconds}
        self.log.record(pending.step, values, seconds_per_step=seconds, event=event)

    def _best_loss(self) -> float:
        losses = [
            metrics["loss"]
            for step in self.checkpoints.steps
            if (metrics := read_metrics(self.checkpoints.directory, step))
        ]
        return min(from_first(losses), default=math.inf)

    def _finished(self, state: TrainState) -> TrainResult:
        self.checkpoints.wait()
        step = int(state.step)
        speed = self.speed
        results = {
            "fingerprint": self.experiment.fingerprint,
            "steps": step,
            "loss": self.loss if math.isfinite(self.loss) else None,
            "validation": self.validation,
            "best_validation_loss": self.best_loss if math.isfinite(self.best_loss) else None,
            "parameters": _size(state.params),
            "memory_parameters": _size(state.memory),
            "session": {
                "steps": speed.total_steps,
                "compile_seconds": self.compile_seconds,
                "train_seconds": speed.total_seconds,
            },
        }
        with together():
            self.log.finish(results)
        self.log.say(
            f"Finished {step} steps; this session trained {speed.total_steps} in "
            f"{format_duration(speed.total_seconds)}. "
            f"Results: {self.log.directory / 'results.json'}"
        )
        return TrainResult("finished", step, state, results, None)


def _size(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))
