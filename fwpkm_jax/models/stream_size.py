"""The memory that the start of a stream takes, known before it is allocated."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

_LARGE = 2**20
"""Tokens of a cache from which on its size is looked at."""


def checked_start(build: Callable[[], Any], *, tokens: int, what: str) -> Any:
    """What `build` gives, unless it would not fit the first device's memory.

    Args:
      build: makes the arrays of a stream's layers, by layer name.
      tokens: the most that one of its caches keeps.
      what: the settings that the caches' sizes come from, for the message.

    Raises:
      ValueError: the arrays take more bytes than the device has.
    """
    if tokens >= _LARGE:
        sizes = {
            name: sum(np.dtype(x.dtype).itemsize * x.size for x in jax.tree.leaves(layer))
            for name, layer in jax.eval_shape(build).items()
        }
        total, most = sum(sizes.values()), device_bytes(jax.local_devices()[:1])
        if total > most:
            name = max(sizes, key=lambda name: sizes[name])
            raise ValueError(
                f"A stream would take {total / 2**30:,.1f} GiB, {name} most of it "
                f"({sizes[name] / 2**30:,.1f} GiB), and the device has {most / 2**30:,.1f} GiB; "
                f"lower {what}."
            )
    return build()


def device_bytes(devices: Sequence[Any]) -> int:
    """Bytes that devices have together; those that do not say it, as CPUs, have the machine's."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return sum(limits) if all(limits) else machine
