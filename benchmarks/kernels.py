"""Times of the kernels and of their references, beside what the device can move in that time.

    python benchmarks/kernels.py --out benchmarks/results/kernels_h100.json
    python benchmarks/kernels.py --stream slots.npz      # recorded slots as well
    python benchmarks/kernels.py --size tiny             # any CPU, kernels interpreted

The device's copy bandwidth is measured in the same run; `of_copy` is the share of it at which an
operation moves the bytes that it cannot but move, distinct rows counted once. The gated delta rule
has a program of its own, `gated_delta.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import row_kernels
import tyro
from machine import copy_bandwidth, environment, write_result

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Backend

CASES: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    op: functools.partial(row_kernels.cases, op)
    for op in ("read", "read_error", "dot", "group", "write", "write_log")
}
"""Operation: an iterator over its cases, each with `seconds` and the `bytes` it has to move."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times kernels and references over named sizes and streams of slots."""

    ops: tuple[str, ...] = tuple(CASES)
    """Operations to time."""
    size: Literal["paper", "tiny"] = "paper"
    """The paper's widths, or what an interpreter gets through."""
    backends: tuple[Backend, ...] = ("pallas", "reference")
    """Implementations to time."""
    stream: Path | None = None
    """Recorded slots: an .npz file with `slot_ids` [..., places]."""
    repeats: int = 9
    """Timed loops; the median is reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def main(options: Options) -> None:
    unknown = set(options.ops) - set(CASES)
    if unknown:
        raise SystemExit(f"No such operation: {sorted(unknown)}; there are {sorted(CASES)}.")
    interpreted = options.size == "tiny" and jax.default_backend() == "cpu"
    results = []
    with dispatch.interpret_kernels("tpu") if interpreted else contextlib.nullcontext():
        for op in options.ops:
            for case in CASES[op](
                size=options.size,
                recorded=options.stream,
                backends=options.backends,
                repeats=options.repeats,
            ):
                results.append({"op": op, **case})
    # Beside the times, not once at the start: a device's clocks move.
    bandwidth = copy_bandwidth() if options.size == "paper" else copy_bandwidth(2**22)
    for result in results:
        rate = result["bytes"] / result["seconds"]
        result["gigabytes_per_second"] = rate / 1e9
        result["of_copy"] = rate / bandwidth
    report = {
        **environment(),
        "interpreted": interpreted,
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "results": results,
    }
    write_result(report, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
