"""A training loop for any step function; it needs no model, file or configuration."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax

State = TypeVar("State")
Batch = TypeVar("Batch")


class Report(NamedTuple, Generic[Batch]):
    """A step whose metrics have been read."""

    step: int
    """Steps done, this one included."""
    batch: Batch
    """The batch of this step."""
    metrics: dict[str, float]
    """The step's metrics; at a pause also those of `Hooks.measure`."""
    seconds: float
    """Seconds since the metrics of the previous step were read, without pauses."""


@dataclass(frozen=True, kw_only=True)
class Hooks(Generic[State, Batch]):
    """Functions that the loop calls between steps. Every default does nothing.

    If a hook raises, the loop ends. `state` is always the newest one: except at a pause, it is
    already one step further than the report. A step that donates its state invalidates it at the
    next call, so a hook that keeps a state must copy it.
    """

    check: Callable[[Report[Batch], State], None] = lambda report, state: None
    """Called first, for every step: raises if training must not go on with these metrics."""
    on_metrics: Callable[[Report[Batch], State], None] = lambda report, state: None
    """Called once for every step, in order, for example to print or record the metrics."""
    pause_after: Callable[[int], bool] = lambda step: False
    """Called as soon as a step has started. True: the loop waits for the step, then calls the two
    hooks below."""
    measure: Callable[[Report[Batch], State], Mapping[str, float]] = lambda report, state: {}
    """Called at a pause, before `on_metrics`; returns more metrics of this step, such as a
    validation loss."""
    on_pause: Callable[[Report[Batch], State], bool] = lambda report, state: False
    """Called at a pause, after `on_metrics`, for example to save; True ends the loop."""


class FitResult(NamedTuple, Generic[State]):
    """The last state of a loop, and whether a hook ended it."""

    state: State
    """The state after the last step."""
    step: int
    """Steps done, those before `start` included."""
    stopped: bool
    """Whether `on_pause` ended it."""


def fit(
    step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]],
    state: State,
    batches: Iterable[Batch],
    hooks: Hooks[State, Batch] | None = None,
    *,
    start: int = 0,
    steps: int | None = None,
) -> FitResult[State]:
    """Takes one step per batch and returns the last state.

    The loop reads the metrics of a step only after the next step has started, so the device does
    not wait for Python. At a pause the loop waits for the step instead.

    Args:
      step: `step(state, batch) -> (state, metrics)`, usually jitted and donating its state; metrics
        are scalars by name.
      state: any pytree.
      batches: one per step; each is read just before the step that uses it.
      hooks: functions that are called between steps; None: no hooks.
      start: steps done before this call; reports count from there.
      steps: steps in all, `start` included; None goes on until the batches end.

    Returns:
      The last state, the number of steps done, and whether a hook ended the loop.

    Raises:
      ValueError: the batches end before `steps`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> @jax.jit
      ... def step(weight, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((w - batch) ** 2))(weight)
      ...     return weight - 0.25 * grad, {"loss": loss}
      >>> losses = []
      >>> hooks = Hooks(on_metrics=lambda report, _: losses.append(report.metrics["loss"]))
      >>> result = fit(step, jnp.zeros(()), [jnp.ones(3)] * 4, hooks)
      >>> losses
      [1.0, 0.25, 0.0625, 0.015625]
      >>> float(result.state), result.step
      (0.9375, 4)
    """
    hooks = Hooks() if hooks is None else hooks
    source = iter(batches)
    done = start
    before = time.perf_counter()
    under_way: tuple[int, Batch, Mapping[str, Any]] | None = None

    def read(pending: tuple[int, Batch, Mapping[str, Any]]) -> Report[Batch]:
        nonlocal before
        number, batch, metrics = pending
        values = {name: float(x) for name, x in jax.device_get(dict(metrics)).items()}
        now = time.perf_counter()
        report = Report(number, batch, values, now - before)
        before = now
        hooks.check(report, state)
        return report

    while steps is None or done < steps:
        try:
            batch = next(source)
        except StopIteration:
            if steps is None:
                break
            raise ValueError(
                f"The batches ended after step {done} of steps={steps}; give one batch per step, "
                "or steps=None to take as many steps as there are batches."
            ) from None
        done += 1
        state, metrics = step(state, batch)
        if under_way is not None:
            hooks.on_metrics(read(under_way), state)
        under_way = (done, batch, metrics)
        if hooks.pause_after(done):
            report = read(under_way)
            under_way = None
            report.metrics.update(hooks.measure(report, state))
            hooks.on_metrics(report, state)
            if hooks.on_pause(report, state):
                return FitResult(state, done, True)
            before = time.perf_counter()
    if under_way is not None:
        hooks.on_metrics(read(under_way), state)
    return FitResult(state, done, False)
