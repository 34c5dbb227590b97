"""Measures what decoding for many users at once gains over one user after another.

    python -m benchmarks.speed.continuous_batching --out FILE

Each user writes a memory of its own over one base. One by one, `generate` makes all tokens of a
user in one call, with a batch of one. At once, the users share a batch
(`generation.continuous_batching`); they join, read some tokens more or less, and so complete their
chunks at different steps. The cases take turns, so that a busy moment of the machine affects all
alike; `cpu` counts the processor's time, which other programs affect less. Joining
and leaving are outside the time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks.machine import environment, peak_host_megabytes, settings, write_result
from benchmarks.options import parse
from benchmarks.speed.models import Size, model_of
from fwpkm_jax.generation import generate, join, leave, open_batch, step
from fwpkm_jax.generation.continuous_batching import ContinuousBatch
from fwpkm_jax.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times decoding of many users with a memory each, one by one and at once."""

    model: str = "gdn_swa__fwpkm2_6_10"
    """One of the paper's models by name."""
    size: Size = "tiny"
    """tiny: 4 narrow layers; paper: 12 layers, 768 wide, 512**2 slots in each memory."""
    layers: int | None = None
    """Only the first so many layers; None: all."""
    batch_slots: int = 16
    """Most users of the batch at a time."""
    users: tuple[int, ...] = (1, 4, 16)
    """Users who are there."""
    capacity: int = 4096
    """Slots of each memory that a user can write."""
    tokens: int = 64
    """New tokens of each user in a timed call; a whole chunk includes one write of every memory."""
    at_a_time: int = 16
    """Tokens that the batch makes between two points where users can join and leave."""
    aligned: bool = False
    """True: all users complete their chunks at the same step; False: as far apart as can be."""
    rounds: int = 5
    """Timed calls of each case."""
    out: Path | None = None
    """File for the JSON; None: print it."""


class Times:
    """Wall and processor time of a case's calls."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def add(self, call: Callable[[], Any]) -> Any:
        """Calls and counts; the call waits for its result."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)
        return result


class Users:
    """The users of one number, in a batch and, with the same memories, one by one."""

    def __init__(self, options: Options, model: LanguageModel, base: Any, number: int):
        self.options, self.model, self.number = options, model, number
        self.length = 2 * options.tokens + options.rounds * options.tokens + 2 * options.batch_slots
        self.length += model.config.fast_weight.chunk_size
        batch = open_batch(
            *(model, base),
            batch_slots=options.batch_slots,
            capacity=options.capacity,
            max_length=self.length,
        )
        rng, chunk = np.random.default_rng(0), model.config.fast_weight.chunk_size
        alone = []
        for user in range(number):
            more = 0 if options.aligned else user * chunk // number
            prompt = rng.integers(model.config.vocab_size, size=1 + more)
            batch, batch_slot = join(model, batch, prompt)
            batch, left = leave(batch, batch_slot)
            alone.append(left)
        for user in alone:
            batch, _ = join(model, batch, None, user=user)
        self.batch: ContinuousBatch = batch
        self.alone = alone
        self.one_by_one, self.at_once = Times(), Times()

    def warm_up(self) -> None:
        """Compiles both ways, and goes through one write of every memory."""
        self.all_at_once()
        self.each_alone()

    def all_at_once(self) -> None:
        for _ in range(self.options.tokens // self.options.at_a_time):
            out = step(self.model, self.batch, tokens=self.options.at_a_time)
            self.batch = out.batch
            assert out.waiting.sum() == self.number, "a user ended: its memory lost rows"

    def each_alone(self) -> None:
        for number, user in enumerate(self.alone):
            out = generate(self.model, None, user, max_new_tokens=self.options.tokens)
            assert not out.failed.any(), "a user ended: its memory lost rows"
            self.alone[number] = out.state


def measure(options: Options) -> list[dict[str, Any]]:
    if options.tokens % options.at_a_time:
        raise ValueError(
            f"tokens={options.tokens} is no multiple of at_a_time={options.at_a_time}."
        )
    config = model_of(options.model, options.size, layers=options.layers)
    if jax.default_backend() == "cpu":
        config = replace(config, activation_dtype="float32")
    graphdef = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))[0]
    params = jax.jit(lambda: nnx.state(LanguageModel(config, rngs=nnx.Rngs(0))))()
    model = nnx.merge(graphdef, params)
    base = model.init_memory(jax.random.key(1))
    cases = [Users(options, model, base, number) for number in options.users]
    for case in cases:
        case.warm_up()
    for _ in range(options.rounds):
        for case in cases:
            case.at_once.add(case.all_at_once)
            case.one_by_one.add(case.each_alone)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    return [row(options, case, parameters) for case in cases]


def row(options: Options, case: Users, parameters: int) -> dict[str, Any]:
    """The rates of one number of users, by the median call, and what the batch gains."""
    tokens = case.number * options.tokens
    alone, batch = case.one_by_one, case.at_once
    gain, cpu_gain = (
        np.array(x) / np.array(y) for x, y in ((alone.wall, batch.wall), (alone.cpu, batch.cpu))
    )
    return {
        "users": case.number,
        "parameters": parameters,
        "one_by_one_tokens_per_s": tokens / float(np.median(alone.wall)),
        "at_once_tokens_per_s": tokens / float(np.median(batch.wall)),
        "times": float(np.median(gain)),
        "times_quartiles": np.quantile(gain, (0.25, 0.75)).tolist(),
        "times_of_cpu_time": float(np.median(cpu_gain)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = measure(options)
    result = {
        "environment": environment(),
        "options": settings(options),
        "rows": rows,
        "peak_megabytes": peak_host_megabytes(),
    }
    write_result(result, options.out)


if __name__ == "__main__":
    main()
