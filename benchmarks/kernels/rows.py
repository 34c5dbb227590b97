"""Times the kernels on rows and their references, and compares them with the copy bandwidth.

    python -m benchmarks.kernels.rows --out benchmarks/results/kernels_h100.json
    python -m benchmarks.kernels.rows --stream slots.npz      # recorded slots as well
    python -m benchmarks.kernels.rows --size tiny             # any CPU, kernels interpreted

The device's copy bandwidth is measured after each operation. `of_copy` divides the rate at which an
operation moves its bytes by this bandwidth; distinct rows are counted once. `gated_delta.py` times
the gated delta rule.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.kernels import row_times
from benchmarks.machine import copy_bandwidth, environment, write_result
from benchmarks.options import parse
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Backend

CASES: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    op: functools.partial(row_times.cases, op)
    for op in ("read", "read_error", "dot", "group", "write", "write_log")
}
"""By operation: yields its cases, each with `seconds` and the `bytes` that it has to move."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times kernels and references over named sizes and streams of slots."""

    ops: tuple[str, ...] = tuple(CASES)
    """Operations to time."""
    size: Literal["paper", "tiny"] = "paper"
    """paper: the paper's widths; tiny: sizes for interpreted kernels."""
    backends: tuple[Backend, ...] = ("pallas", "reference")
    """Implementations to time."""
    stream: Path | None = None
    """Recorded slots, timed too: an .npz file with `slot_ids` [..., places], as
    `speed.train_step --record` writes it."""
    repeats: int = 9
    """Timed loops; the median is reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    unknown = set(options.ops) - set(CASES)
    if unknown:
        raise SystemExit(f"No such operation: {sorted(unknown)}; there are {sorted(CASES)}.")
    interpreted = options.size == "tiny" and jax.default_backend() == "cpu"
    results: list[dict[str, Any]] = []
    report = {**environment(), "interpreted": interpreted, "results": results}
    # Interpreted kernels need no exact bandwidth, so a small copy is enough.
    copied = 2**28 if options.size == "paper" else 2**22
    with dispatch.interpret_kernels("tpu") if interpreted else contextlib.nullcontext():
        for op in options.ops:
            before = len(results)
            for case in CASES[op](
                size=options.size,
                recorded=options.stream,
                backends=options.backends,
                repeats=options.repeats,
            ):
                results.append({"op": op, **case})
                if options.out is not None:
                    write_result(report, options.out)
            # After each operation, not once at the start: a device's clocks change.
            bandwidth = copy_bandwidth(copied)
            for result in results[before:]:
                rate = result["bytes"] / result["seconds"]
                result["copy_gigabytes_per_second"] = bandwidth / 1e9
                result["gigabytes_per_second"] = rate / 1e9
                result["of_copy"] = rate / bandwidth
            if options.out is not None:
                write_result(report, options.out)
    if options.out is None:
        write_result(report, None)


if __name__ == "__main__":
    main()
