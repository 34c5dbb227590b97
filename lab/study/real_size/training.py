"""Trains the variants in turns, so that they have equal steps whenever time runs out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fwpkm_jax.training.state import TrainState
from lab.study.real_size.programs import Programs, plan
from lab.study.real_size.text import TrainingText

_WARM = 2

Write = Callable[..., None]
"""Stores one line of results."""


def step_seconds(programs: Programs, text: TrainingText, *, seed: int, turn: int) -> float:
    """Mean seconds of the queued steps of a turn, of a state that is thrown away."""
    state = programs.init(np.int32(seed))
    for number in range(_WARM):
        state, _ = programs.step(state, jax.device_put(text.batch(number)))
    jax.block_until_ready(state)
    began = time.perf_counter()
    for number in range(turn):
        state, _ = programs.step(state, jax.device_put(text.batch(_WARM + number)))
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / turn


def planned_steps(seconds: dict[str, float], *, available: float, most: int, turn: int) -> int:
    """Steps of each variant that fit into the time, a whole number of turns, at least one."""
    fitting = 0.95 * available / sum(seconds.values())
    return max(int(min(fitting, most)) // turn, 1) * turn


def train(
    variants: dict[str, Programs],
    text: TrainingText,
    *,
    seed: int,
    steps: int,
    turn: int,
    until: float,
    write: Write,
) -> dict[str, TrainState]:
    """The trained states.

    Args:
      variants: compiled programs by name.
      text: to train on; all read the same rows.
      seed: of the weights.
      steps: of each variant, a multiple of `turn`.
      turn: steps of a variant before the next one's.
      until: `time.monotonic()` after which no turn starts; then all have had equal steps.
      write: gets a line for each turn.
    """
    states = {
        name: plan(programs.init(np.int32(seed)), steps) for name, programs in variants.items()
    }
    for first in range(0, steps, turn):
        if first and time.monotonic() > until:
            write(part="train", stopped_at=first, planned=steps)
            break
        for name, programs in variants.items():
            began, metrics = time.perf_counter(), []
            for step in range(first, first + turn):
                batch = jax.device_put(text.batch(step))
                states[name], found = programs.step(states[name], batch)
                metrics.append(found)
            metrics = jax.device_get(metrics)
            seconds = (time.perf_counter() - began) / len(metrics)
            write(
                part="train", variant=name, step=first + len(metrics), **summary(metrics, seconds)
            )
    return states


def summary(metrics: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Means over a turn."""
    left_out = ("param_norm", "lr")
    means = {
        name: round(float(np.mean([one[name] for one in metrics])), 5)
        for name in metrics[0]
        if name not in left_out
    }
    return {"ms": round(1e3 * seconds, 2), **means}
