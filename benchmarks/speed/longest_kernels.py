"""Reduces a profile to the kernels that took longest."""

import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def longest_kernels(
    call: Callable[[], Any], *, number: int | None, calls: int = 2
) -> list[dict[str, Any]]:
    """The `number` kernels with the largest total time in `calls` calls, longest first.

    Each has its name, milliseconds and launches per call, and its share of the time of all kernels.
    On a CPU, XLA's operations take the place of kernels.

    Args:
      call: one step, compiled before.
      number: how many to return; None: all.
      calls: steps in the profile.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(file))
    nanoseconds: dict[str, list[float]] = defaultdict(list)
    for name, duration in _kernels(profile):
        nanoseconds[name].append(duration)
    total = sum(map(sum, nanoseconds.values()))
    longest = sorted(nanoseconds.items(), key=lambda item: -sum(item[1]))[:number]
    return [
        {
            "name": name[:120],
            "milliseconds": sum(times) / calls / 1e6,
            "launches": len(times) / calls,
            "share": sum(times) / total,
        }
        for name, times in longest
    ]


def _kernels(profile: Any) -> Iterator[tuple[str, float]]:
    """Name and nanoseconds of every kernel of the first device, or of every operation of a CPU."""
    devices = [plane for plane in profile.planes if plane.name.startswith("/device:")]
    if devices:
        lines = list(devices[0].lines)
        # A GPU's streams have the kernels; further lines, if any, repeat them by operation.
        streams = [line for line in lines if line.name.startswith("Stream")] or lines
        for line in streams:
            yield from ((event.name, event.duration_ns) for event in line.events)
        return
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                with warnings.catch_warnings():  # jax 0.11's reader of `stats` causes one.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    is_operation = any(name == "hlo_op" for name, _ in event.stats)
                if is_operation:
                    yield event.name, event.duration_ns
