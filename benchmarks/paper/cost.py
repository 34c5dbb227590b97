"""Prints size and speed of the paper's models beside the paper's figures.

python -m benchmarks.paper.cost
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax

from benchmarks.paper.parameters import count_parameters
from benchmarks.paper.published import PUBLISHED, TOKENS_PER_STEP
from benchmarks.paper.throughput import Throughput, samples_per_second
from fwpkm_jax.io.options import read_options
from fwpkm_jax.io.terminal import say_error
from fwpkm_jax.layers.mixers import LaCTConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.paper.models import TABLE_1, paper_model
from fwpkm_jax.rules import FwMLP

APPENDIX_HIDDEN = 2304
"""FwMLP's hidden width in the paper's Appendix C; a width of 512 gives Table 1's counts."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Prints Table 1 of the paper: parameters, FLOPs and speed, each beside the paper's figure."""

    models: tuple[str, ...] = TABLE_1
    """Rows to print, by the names of the files in configs/."""
    measure: bool = False
    """Times training steps on this machine; the paper used an H100."""
    batch_size: int = 8
    """Sequences per measured step."""
    length: int = 4096
    """Tokens per measured sequence."""
    steps: int = 10
    """Timed steps after one warm-up step; the median is reported."""


class Cost(NamedTuple):
    """Size of a model: its parameters, those that one token uses, operations per training step."""

    total: int
    active: int
    flops: float


def model_cost(config: ModelConfig, *, tokens: int = TOKENS_PER_STEP, length: int = 4096) -> Cost:
    """Parameters, and FLOPs of a training step, by the paper's conventions.

    A step costs 6 operations per token and active parameter: 2 forward, 4 backward. Attention
    scores and writes to slots are not counted. What LaCT multiplies beyond its parameters is added.

    Args:
      config: the model.
      tokens: tokens per step.
      length: tokens per sequence.
    """
    total, active = count_parameters(config)
    flops = 6.0 * active * tokens
    for mixer in config.mixer_configs:
        if isinstance(mixer, LaCTConfig):
            flops += 6.0 * tokens * lact_products(mixer, config.model_dim, length)
    return Cost(total, active, flops)


def lact_products(lact: LaCTConfig, model_dim: int, length: int) -> float:
    """Products of LaCT's fast networks: a token passes 3 matrices to be read, 6 to be written.

    The count of parameters includes the initial gate and up matrices, whole or as factors. A
    token multiplies by those of its sequence instead, so the initial ones are subtracted. The
    last chunk of a sequence is never written.
    """
    width = model_dim // lact.num_fast_heads
    matrix = lact.num_fast_heads * width * lact.hidden_dim
    starts = 2 * matrix
    if lact.low_rank is not None:
        starts = 2 * lact.num_fast_heads * lact.low_rank * (width + lact.hidden_dim)
    written = (length - 1) // lact.chunk_size * lact.chunk_size / length
    # Reads pass gate, up and down; writes take two gradient products for each.
    products = (3 + 6 * written) * matrix
    return products - matrix - starts


def cost_table(options: Options) -> str:
    """The table as text; each of our figures stands beside the paper's."""
    header = ["model", "total M", "paper", "active M", "paper", "TFLOP/step", "paper"]
    header += ["samples/s", "paper (H100)"]
    rows = []
    for name in options.models:
        model, paper = paper_model(name), PUBLISHED.get(name)
        speed = _speed(model, options)
        rows.append(_row(name, model, paper and tuple(paper), speed))
        if name.endswith("__fwmlp2_6_10"):
            wide = replace(model.fast_weight, rule=FwMLP(hidden_dim=APPENDIX_HIDDEN))
            wider = replace(model, fast_weight=wide)
            rows.append(_row(f"  with hidden {APPENDIX_HIDDEN} (Appendix C)", wider, None, "-"))
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(row))
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    if options.measure:
        device = jax.devices()[0]
        lines.append(
            f"samples/s: training steps of {options.batch_size} x {options.length} tokens on one "
            f"{device.device_kind}, median of {options.steps}."
        )
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, model: ModelConfig, paper: tuple[float, ...] | None, speed: str) -> list[str]:
    cost = model_cost(model)
    ours = (cost.total / 1e6, cost.active / 1e6, cost.flops / 1e12)
    theirs = [f"{x:.2f}" for x in paper] if paper else ["-"] * 4
    cells = [cell for x, y in zip(ours, theirs[:3], strict=True) for cell in (f"{x:.2f}", y)]
    return [name, *cells, speed, theirs[3]]


def _speed(model: ModelConfig, options: Options) -> str:
    if not options.measure:
        return "-"
    try:
        measured: Throughput = samples_per_second(
            model, batch_size=options.batch_size, length=options.length, steps=options.steps
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return "out of memory"
    return f"{measured.median:.3g}"


def main(arguments: Sequence[str]) -> int:
    """Prints the table that a command line asks for; returns the program's exit code."""
    try:
        print(cost_table(read_options(Options, arguments, program="benchmarks.paper.cost")))
    except ValueError as error:
        say_error("benchmarks.paper.cost", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
