"""Times the gated delta rule: the device's kernels, plain JAX, and flash-linear-attention.

    python -m benchmarks.kernels.gated_delta --peer-fla FLA_PYTHON --out gated_delta.json

Each shape is timed forward, and forward + backward to every argument. `share_of_matmul` divides the
rate of the products of the chunk form by the rate of a large float32 product on this device;
additional products that an implementation spends on precision are not counted. `--peer-fla` is a
Python with torch and flash-linear-attention on the same GPU. Its chunk kernel gets the same shapes
in bfloat16, the dtype for which it was written; the kernels of this package get `--dtypes`.

On a CPU, where there are no kernels, `--shapes tiny` times plain JAX alone.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import processes
from benchmarks.machine import (
    environment,
    peak_device_megabytes,
    planned_megabytes,
    queued_seconds,
    write_result,
)
from benchmarks.options import parse
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.specs import SPECS, GatedDeltaSpec, sample

Pass = Literal["forward", "train"]
Dtype = Literal["float32", "bfloat16"]
PEER_PROGRAM = Path(__file__).with_name("peer_fla.py")
TINY = GatedDeltaSpec(name="tiny", length=256, heads=2)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the gated delta rule by kernels, by plain JAX and by a peer."""

    shapes: tuple[str, ...] = ("paper", "long", "paper_wide")
    """Names of specs in `pallas_kernels/gated_delta/specs.py`, or `tiny`."""
    passes: tuple[Pass, ...] = ("forward", "train")
    """Forward alone, or forward + backward to every argument."""
    backends: tuple[Literal["pallas", "reference"], ...] = ("pallas", "reference")
    """pallas: the device's kernels; reference: plain JAX."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Dtypes of queries, keys and values."""
    repeats: int = 20
    """Timed calls; the median is reported."""
    peer_fla: Path | None = None
    """A Python with flash-linear-attention; None: no peer is timed."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def find_spec(name: str) -> GatedDeltaSpec:
    """The spec of that name."""
    named = {spec.name: spec for spec in (*SPECS, TINY)}
    if name not in named:
        raise SystemExit(f"--shapes {name}: choose from {', '.join(named)}.")
    return named[name]


def flops(spec: GatedDeltaSpec, which: Pass) -> float:
    """Operations of the chunk form's products; the backward pass has two for each forward one."""
    tiles = spec.batch * spec.heads * -(-spec.length // CHUNK)
    square = 3 * spec.key + 2 * spec.value  # K K^T, Q K^T, Y; U, P W.
    forward = 2 * CHUNK * (CHUNK * square + 3 * spec.key * spec.value)  # Y S, Q S, K^T W.
    return tiles * forward * {"forward": 1, "train": 3}[which]


def measure(options: Options, spec: GatedDeltaSpec, **choice: Any) -> dict[str, Any]:
    """One shape, pass, dtype and backend in this process."""
    arrays = sample(spec, jnp.dtype(choice["dtype"]))

    def forward(arrays):
        return tuple(chunk_gated_delta_rule(**arrays, backend=choice["backend"]))

    def train(arrays):
        outputs, pull = jax.vjp(forward, arrays)
        return outputs, pull(outputs)

    function = {"forward": forward, "train": train}[choice["passes"]]
    compiled = jax.jit(function).lower(arrays).compile()
    seconds, spread = queued_seconds(lambda: compiled(arrays), repeats=options.repeats)
    return {
        "seconds": seconds,
        "spread": spread,
        "gigaflops_per_second": flops(spec, choice["passes"]) / seconds / 1e9,
        "peak_device_megabytes": peak_device_megabytes(),
        "temporary_megabytes": planned_megabytes(compiled)["temporary"],
    }


def measure_peer(options: Options, spec: GatedDeltaSpec, which: Pass) -> dict[str, Any]:
    """The peer's time for the same shape, from a process of its own."""
    sizes = {name: getattr(spec, name) for name in ("batch", "length", "heads", "key", "value")}
    task = {**sizes, "train": which == "train", "repeats": options.repeats}
    command = [str(options.peer_fla), str(PEER_PROGRAM), "--task", json.dumps(task)]
    return processes.run_json(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every combination and writes one JSON."""
    options = parse(Options, argv, description=__doc__)
    machine = environment()
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        if options.out is not None:
            write_result({"environment": machine, "rows": rows}, options.out)

    for name in options.shapes:
        spec = find_spec(name)
        for which in options.passes:
            for dtype in options.dtypes:
                for backend in options.backends:
                    choice = {"passes": which, "dtype": dtype, "backend": backend}
                    row = {"shape": name, **choice, **measure(options, spec, **choice)}
                    share = row["gigaflops_per_second"] / machine["matmul_gigaflops"]
                    add(row | {"share_of_matmul": share})
                    print(f"{name} {choice}: {1e3 * row['seconds']:.3f} ms", file=sys.stderr)
            if options.peer_fla is not None:
                peer = measure_peer(options, spec, which)
                add({"shape": name, "passes": which, "backend": "fla", **peer})
    if options.out is None:
        write_result({"environment": machine, "rows": rows}, None)


if __name__ == "__main__":
    main()
