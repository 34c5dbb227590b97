"""Writes down what a machine is before anything else runs on it.

    python -m benchmarks.bring_up.device --out device.json

Versions, driver, libraries, and the device's topology as bytes: from these, programs are compiled
ahead of time for the same device elsewhere (`benchmarks.compiled.executables --topology`). What
cannot be found out is left as a line that says why; the rates are measured last.
"""

import base64
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks.machine import environment, write_result
from benchmarks.options import parse

_LIBRARIES = ("jax", "flax", "optax", "orbax", "chex", "numpy", "nvidia", "torch", "triton")
_LIBRARIES += ("flash-linear-attention", "fla-core", "jaxtyping", "libtpu", "zstandard", "pytest")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Describes this machine and its device."""

    out: Path | None = None
    """File for the JSON; None: print it."""


def facts() -> dict[str, Any]:
    """What can be read without running anything on the device but its start."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "platform_version": _tried(lambda: device.client.platform_version),
        "compute_capability": _tried(lambda: str(device.compute_capability)),
        "topology": _tried(lambda: base64.b64encode(_serialized(device)).decode()),
        "device_attributes": _tried(lambda: str(vars_of(device))),
        "memory": _tried(device.memory_stats),
        "driver": _tried(_driver),
        "cpus": len(os.sched_getaffinity(0)),
        "host_gigabytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "system": platform.platform(),
        "python": sys.version,
        "libraries": dict(sorted(_libraries().items())),
    }


def _serialized(device: Any) -> bytes:
    # TODO: drop the comment once jax 0.10, which has no `serialize`, is dropped.
    description = topologies.TopologyDescription([device])
    return description.serialize()  # pyright: ignore[reportAttributeAccessIssue]


def vars_of(device: Any) -> dict[str, str]:
    """The attributes of a device that are plain values."""
    plain = (bool, int, float, str)
    names = (name for name in dir(device) if not name.startswith("_"))
    found = {name: getattr(device, name, None) for name in names}
    return {name: str(value) for name, value in found.items() if isinstance(value, plain)}


def _libraries() -> dict[str, str]:
    named = {found.metadata["Name"] or "": found.version for found in distributions()}
    return {name: at for name, at in named.items() if name.lower().startswith(_LIBRARIES)}


def _driver() -> str:
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem"
    return subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout.strip()


def _tried(find: Callable[[], Any]) -> Any:
    """What `find` returns, or why it returned nothing: other facts must not be lost with it."""
    try:
        return find()
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"[:300]}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    found = facts()
    said = {name: found[name] for name in ("device", "platform_version", "driver", "cpus")}
    print(json.dumps(said), file=sys.stderr, flush=True)
    write_result(found, options.out)  # Kept before anything is measured.
    found["environment"] = environment()
    write_result(found, options.out)


if __name__ == "__main__":
    main()
