"""Times the chunked form of every matrix memory relative to Gated DeltaNet; memory by length.

    taskset -c 1 python -m benchmarks.speed.mixers --out benchmarks/results/mixers_cpu.json

Rules run without projections, in float32, forward and forward + backward to every argument. Times
are CPU seconds of the process. Rules take turns and medians are reported, so that other work on the
machine has little effect and affects all rules alike. `writes` is the number of writes per token;
`relative_per_write` divides the relative time by it. Temporary memory is what the compiler
allocates for forward + backward.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import environment, planned_megabytes, write_result
from benchmarks.options import parse
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule, Tokens
from fwpkm_jax.rules.matrix.base import strength_axis

Pass = Literal["forward", "train"]
BASE = "gated_deltanet"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the chunked form of matrix memories."""

    rules: tuple[str, ...] = tuple(MATRIX_RULES)
    """Names of rules; Gated DeltaNet is always timed as well."""
    passes: tuple[Pass, ...] = ("forward", "train")
    """Passes to time: forward alone, forward + backward to every argument."""
    length: int = 4096
    """Tokens of the timed sequence."""
    memory_lengths: tuple[int, ...] = (2048, 4096, 8192)
    """Lengths for which memory is reported; may be empty."""
    heads: int = 8
    """Heads of the sequence."""
    width: int = 64
    """Width of keys and values."""
    repeats: int = 7
    """Timed turns of each rule; medians are reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def sample(rule: AbstractMatrixRule, length: int, options: Options) -> Tokens:
    """Tokens with unit keys and values, mild decays, and gates between 0 and 1."""
    rng = np.random.default_rng(0)

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    tokens = (1, length, options.heads)
    writes = (1, length * rule.steps, options.heads)
    strengths = writes + strength_axis(rule.strength, options.width, options.width)
    log_decay = -0.1 * rng.random(size=tokens + (options.width,) * (rule.decay == "key"))
    arrays = {
        "query": unit(*tokens, options.width),
        "key": unit(*writes, options.width),
        "value": unit(*writes, options.width),
        "log_decay": None if rule.decay == "none" else log_decay,
        "strength": rng.random(size=strengths) if rule.strength else None,
    }
    return Tokens(**jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays))


def compiled(rule: AbstractMatrixRule, which: Pass, tokens: Tokens, *, fast: bool = True) -> Any:
    """The pass compiled for such tokens; `fast=False` saves compile time if only memory counts."""

    def forward(tokens):
        return tuple(rule.run(tokens))

    def train(tokens):
        outputs, pull = jax.vjp(forward, tokens)
        return outputs, pull(outputs)

    lowered = jax.jit({"forward": forward, "train": train}[which]).lower(tokens)
    hurried = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return lowered.compile(None if fast else hurried)


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def measure(options: Options, which: Pass) -> list[dict[str, Any]]:
    """Times one pass of every rule."""
    names = [BASE, *(name for name in options.rules if name != BASE)]
    rules = {name: MATRIX_RULES[name]() for name in names}
    inputs = {name: sample(rule, options.length, options) for name, rule in rules.items()}
    programs = {name: compiled(rule, which, inputs[name]) for name, rule in rules.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.repeats + 1):
        for name, program in programs.items():
            seconds = cpu_seconds(lambda program=program, name=name: program(inputs[name]))
            if turn:  # The first turn warms up.
                times[name].append(seconds)
    base = statistics.median(times[BASE])
    rows = []
    for name, rule in rules.items():
        seconds = statistics.median(times[name])
        rows.append(
            {
                "rule": name,
                "pass": which,
                "writes": rule.steps,
                "chunk_size": rule.chunk_size,
                "cpu_seconds": seconds,
                "spread": max(times[name]) - min(times[name]),
                "relative": seconds / base,
                "relative_per_write": seconds / base / rule.steps,
            }
        )
        print(f"{which} {name}: {1e3 * seconds:.1f} ms, {seconds / base:.2f}", file=sys.stderr)
    return rows


def temporary_megabytes(options: Options, name: str) -> dict[int, float]:
    """Temporary memory of forward + backward with one rule, by length."""
    rule = MATRIX_RULES[name]()
    megabytes = {}
    for length in options.memory_lengths:
        program = compiled(rule, "train", sample(rule, length, options), fast=False)
        megabytes[length] = planned_megabytes(program)["temporary"]
    print(f"memory {name}: {megabytes}", file=sys.stderr)
    return megabytes


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both passes and writes one JSON."""
    options = parse(Options, argv, description=__doc__)
    machine = environment()
    rows = [row for which in options.passes for row in measure(options, which)]
    memory = {name: temporary_megabytes(options, name) for name in options.rules}
    sizes = {"length": options.length, "heads": options.heads, "width": options.width}
    results = {"environment": machine, **sizes, "rows": rows, "temporary_megabytes": memory}
    write_result(results, options.out)


if __name__ == "__main__":
    main()
