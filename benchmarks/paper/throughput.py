"""Measures how many sequences per second a model trains on, on this machine."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np

from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from fwpkm_jax.training.step import make_train_step


class Throughput(NamedTuple):
    """Sequences per second in the median, the slowest and the fastest step."""

    median: float
    slowest: float
    fastest: float


def samples_per_second(
    model: ModelConfig, *, batch_size: int, length: int, steps: int
) -> Throughput:
    """Times whole training steps on random tokens; the batch shares one carried memory.

    Compilation and the first step are not timed.

    Args:
      model: the model.
      batch_size: sequences per step.
      length: tokens per sequence.
      steps: timed steps.
    """
    optimizer_config, memory = OptimizerConfig(), MemoryConfig(groups=1, lifetime="carried")
    optimizer = make_optimizer(optimizer_config, steps=1000)
    step = make_train_step(
        model_graph(model),
        optimizer,
        schedule=learning_rate_schedule(optimizer_config, steps=1000),
        micro_batches=1,
        memory=memory,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.vocab_size, size=(batch_size, length + 1), dtype=np.int32)
    weights = np.ones((batch_size, length), np.float32)
    batch = jax.device_put({"tokens": tokens, "loss_weight": weights})
    state = jax.jit(lambda: init_state(model, memory=memory, optimizer=optimizer, seed=0))()
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    seconds = []
    for _ in range(steps):
        jax.block_until_ready((state, metrics))
        began = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    rates = [batch_size / s for s in sorted(seconds)]
    return Throughput(batch_size / float(np.median(seconds)), rates[-1], rates[0])
