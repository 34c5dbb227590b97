"""Describes where a benchmark ran: versions, device, and the device's measured limits."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# JAX reads this when it first uses the device. A benchmark's parent process and a peer share the
# device with the timed process, so none of them may allocate most of its memory in advance.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def call_seconds(function: Callable[[], Any], *, repeats: int) -> list[float]:
    """The times of `repeats` calls, after one warm-up call."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return times


def median_seconds(function: Callable[[], Any], *, repeats: int) -> tuple[float, float]:
    """Median and spread (slowest minus fastest) of the time of a call, after one warm-up call."""
    times = call_seconds(function, repeats=repeats)
    return statistics.median(times), max(times) - min(times)


def queued_seconds(
    function: Callable[[], Any], *, repeats: int, at_least_s: float = 0.02
) -> tuple[float, float]:
    """Median and spread of the time of a call on the device, without the host's part.

    Each measurement enqueues as many calls as take `at_least_s`, and waits for the last one.
    """
    once, _ = median_seconds(function, repeats=1)
    calls = max(1, round(at_least_s / once))

    def several() -> Any:
        for _ in range(calls - 1):
            function()
        return function()

    seconds, spread = median_seconds(several, repeats=repeats)
    return seconds / calls, spread / calls


def planned_megabytes(compiled: Any) -> dict[str, float]:
    """What a compiled program takes by its compiler's account, in MB.

    `argument`, `temporary`, `peak`, and `new_output`: the results that do not lie where an argument
    was.

    Raises:
      ValueError: the compiler gives no account.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(f"the compiler of {jax.default_backend()} gives no account of memory.")
    sizes = {
        "argument": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "new_output": memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    return {name: size / 1e6 for name, size in sizes.items()}


def copy_bandwidth(num_bytes: int | None = None) -> float:
    """Bytes per second read and written by a large elementwise copy of random numbers.

    Args:
      num_bytes: size of the buffer; None: 256 MB, on accelerators 1 GB, far above their caches.
    """
    num_bytes = num_bytes or (2**28 if jax.default_backend() == "cpu" else 2**30)
    x = jax.random.uniform(jax.random.key(0), (num_bytes // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    seconds, _ = queued_seconds(lambda: copy(x), repeats=5)
    return 2 * num_bytes / seconds


def matmul_rate(size: int = 2048, dtype: DTypeLike = jnp.float32) -> float:
    """Floating-point operations per second of a square product of random numbers, float32 at full
    precision."""
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=jax.lax.Precision.HIGHEST))
    seconds, _ = queued_seconds(lambda: product(x), repeats=5)
    return 2 * size**3 / seconds


def peak_device_megabytes() -> float | None:
    """Peak memory of the device; None on devices that do not report it, such as a CPU."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    peak = statistics_of_device.get("peak_bytes_in_use")
    return None if peak is None else peak / 1e6


def peak_host_megabytes() -> float:
    """Peak memory of this process; `ru_maxrss` would start at its parent's."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


def environment() -> dict[str, Any]:
    """Device, versions, commit, date, the compiler's flags, and the device's measured limits."""
    device = jax.devices()[0]
    limits = {
        "copy_gigabytes_per_second": copy_bandwidth() / 1e9,
        "matmul_gigaflops": matmul_rate() / 1e9,
    }
    if device.platform != "cpu":
        limits["bfloat16_matmul_gigaflops"] = matmul_rate(8192, jnp.bfloat16) / 1e9
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "device": device.device_kind,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS") or None,
        **limits,
    }


@cache
def environment_once() -> dict[str, Any]:
    """`environment()`, measured once in a process, for programs that store many lines."""
    return environment()


def commit() -> str | None:
    """The commit of this checkout; None where there is no git or no history."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    where = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout.strip() or None


def settings(options: Any) -> dict[str, Any]:
    """The options that a result depends on; paths of files are left out."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if not isinstance(value, Path)}


def write_result(result: Any, out: Path | None) -> None:
    """Writes a benchmark's JSON into a file, whole or not at all, or prints it."""
    text = json.dumps(result, indent=1, default=str)
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f"{out.name}.partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(out)
