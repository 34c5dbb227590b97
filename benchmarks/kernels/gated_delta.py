"""Times the gated delta rule: the device's kernels, plain JAX, and flash-linear-attention.

    python -m benchmarks.kernels.gated_delta --peer-fla FLA_PYTHON --out gated_delta.json

Each shape is timed forward, and forward + backward to every argument. All sides of a shape are
processes that take turns: each turn is a block of queued calls, at least `--block-s` long, while
the others wait, so that a change of the device's clocks affects all alike. A row has the median of
the blocks and their spread. `share_of_matmul` divides the rate of the products of the chunk form by
the rate of a large float32 product on this device; additional products that an implementation
spends on precision are not counted.

`--peer-fla` is a Python with torch and flash-linear-attention on the same GPU. Its chunk kernel
gets the same shapes in bfloat16, the dtype for which it was written; the kernels of this package
get `--dtypes`. A row of a bfloat16 kernel has `time_of_peer`, its time over the peer's. On Hopper
its backward pass needs Triton 3.7.1 or newer; a pass that it refuses has the reason in its row.
`--prepare` compiles everything, the peer's kernels too, and times nothing.

On a CPU, where there are no kernels, `--shapes tiny` times plain JAX alone.
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
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
    write_result,
)
from benchmarks.options import from_json, parse, to_json
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta.arguments import CHUNK
from pallas_kernels.gated_delta.specs import SPECS, GatedDeltaSpec, sample

Pass = Literal["forward", "train"]
Dtype = Literal["float32", "bfloat16"]
SideBackend = Literal["pallas", "reference", "jla", "deltanet_tpu"]
PEER_PROGRAM = Path(__file__).with_name("peer_fla.py")
TINY = GatedDeltaSpec(name="tiny", length=256, heads=2)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the gated delta rule by kernels, by plain JAX and by a peer."""

    shapes: tuple[str, ...] = ("paper", "long", "paper_wide")
    """Names of specs in `pallas_kernels/gated_delta/specs.py`, or `tiny`."""
    passes: tuple[Pass, ...] = ("forward", "train")
    """Forward alone, or forward + backward to every argument."""
    backends: tuple[SideBackend, ...] = ("pallas", "reference")
    """pallas: the device's kernels; reference: plain JAX; jla, deltanet_tpu: other packages'."""
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """Dtypes of queries, keys and values."""
    repeats: int = 20
    """Blocks of each side and pass; the median is reported."""
    block_s: float = 0.1
    """Seconds of a block of calls, at least."""
    limit_s: float = 240
    """Seconds for a side to compile, and for each block."""
    prepare: bool = False
    """Only compiles, so that a later call finds all programs."""
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


def talk(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One shape, dtype and backend in this process: ready, then a block of calls for each turn."""
    options, spec = from_json(Options, task["options"]), find_spec(task["shape"])
    arrays = sample(spec, jnp.dtype(task["dtype"]))

    def forward(arrays):
        return tuple(chunk_gated_delta_rule(**arrays, backend=task["backend"]))

    def train(arrays):
        outputs, pull = jax.vjp(forward, arrays)
        return outputs, pull(outputs)

    functions = {"forward": forward, "train": train}
    compiled = {
        which: jax.jit(functions[which]).lower(arrays).compile() for which in options.passes
    }
    yield {which: planned_megabytes(one) for which, one in compiled.items()}
    for one in compiled.values():

        def seconds(calls: int, one: Any = one) -> float:
            began = time.perf_counter()
            for _ in range(calls - 1):
                one(arrays)
            jax.block_until_ready(one(arrays))
            return (time.perf_counter() - began) / calls

        seconds(1)
        calls = max(1, round(options.block_s / seconds(5)))
        for _ in range(options.repeats):
            yield {"seconds": seconds(calls), "peak_device_megabytes": peak_device_megabytes()}


def sides(options: Options, name: str) -> dict[tuple[str, str], processes.Conversation]:
    """The processes of a shape, by backend and dtype."""
    module, found = "benchmarks.kernels.gated_delta", {}
    for dtype in options.dtypes:
        for backend in options.backends:
            task = {"options": to_json(options), "shape": name, "dtype": dtype}
            found[backend, dtype] = processes.Conversation.of(module, task | {"backend": backend})
    if options.peer_fla is not None:
        spec = find_spec(name)
        sizes = {one: getattr(spec, one) for one in ("batch", "length", "heads", "key", "value")}
        task = {**sizes, "passes": options.passes, "repeats": options.repeats}
        task["block_s"] = options.block_s
        command = [str(options.peer_fla), str(PEER_PROGRAM), "--task", json.dumps(task)]
        # Tiles are chosen on the quiet device, not taken from a run beside other programs.
        found["fla", "bfloat16"] = processes.Conversation(
            command, variables={"FLA_CACHE_RESULTS": "0"}
        )
    return found


def measure(options: Options, name: str, matmul_gigaflops: float | None) -> list[dict[str, Any]]:
    """The rows of one shape, whose sides take turns."""
    talks = sides(options, name)
    rows = []
    try:
        ready = {}
        for side, talk_ in talks.items():  # One after the other: a peer tries its tiles here.
            ready[side] = talk_.hear(options.limit_s)
        ended = {side: row["failed"] for side, row in ready.items() if "failed" in row}
        for which in () if options.prepare else options.passes:
            # A peer may have one pass and not the other.
            refused = {side: row.get("refused", {}).get(which) for side, row in ready.items()}
            failed = {side: why for side, why in refused.items() if why} | ended
            blocks: dict[tuple[str, str], list[dict[str, Any]]] = {side: [] for side in talks}
            for _ in range(options.repeats):
                for side, talk_ in talks.items():
                    if side in failed:
                        continue
                    talk_.tell()
                    block = talk_.hear(options.limit_s)
                    if "failed" in block:
                        failed[side] = ended[side] = block["failed"]
                    else:
                        blocks[side].append(block)
            rows += _rows(name, which, blocks, ready, failed, matmul_gigaflops)
    finally:
        for talk_ in talks.values():
            talk_.end()
    return rows or [{"shape": name, "prepared": [list(x) for x in ready if x not in ended]}]


def _rows(
    name: str,
    which: Pass,
    blocks: dict[tuple[str, str], list[dict[str, Any]]],
    ready: dict[tuple[str, str], dict[str, Any]],
    failed: dict[tuple[str, str], str],
    matmul_gigaflops: float | None,
) -> list[dict[str, Any]]:
    peer = [block["seconds"] for block in blocks.get(("fla", "bfloat16"), ())]
    rows = []
    for (backend, dtype), found in blocks.items():
        row: dict[str, Any] = {"shape": name, "passes": which, "dtype": dtype, "backend": backend}
        if (backend, dtype) in failed:
            row["failed"] = failed[backend, dtype]
        if found:
            times = [block["seconds"] for block in found]
            median, quarters = statistics.median(times), statistics.quantiles([*times, *times], n=4)
            row |= {
                **found[-1],
                "seconds": median,
                "spread": max(times) - min(times),
                "relative_spread": (max(times) - min(times)) / median,
                "relative_quartiles": (quarters[2] - quarters[0]) / median,
                "blocks": times,
            }
            if backend == "fla":
                row |= {fact: ready[backend, dtype].get(fact) for fact in ("version", "torch")}
            else:
                rate = flops(find_spec(name), which) / median / 1e9
                row |= {"gigaflops_per_second": rate, "planned": ready[backend, dtype][which]}
                if matmul_gigaflops is not None:
                    row["share_of_matmul"] = rate / matmul_gigaflops
            if peer and dtype == "bfloat16" and backend != "fla":
                row["time_of_peer"] = median / statistics.median(peer)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every shape and writes one JSON, after each of them."""
    options = parse(Options, argv, description=__doc__)
    for name in options.shapes:
        find_spec(name)  # A misspelt name is refused before anything is measured.
    machine = None if options.prepare else environment()
    rows: list[dict[str, Any]] = []
    for name in options.shapes:
        rows += measure(options, name, None if machine is None else machine["matmul_gigaflops"])
        for row in rows:
            if row["shape"] == name and "seconds" in row:
                said = f"{1e3 * row['seconds']:.3f} ms, spread {row['relative_spread']:.1%}"
                print(f"{name} {row['passes']} {row['backend']} {row['dtype']}: {said}")
        if options.out is not None:
            write_result({"environment": machine, "rows": rows}, options.out)
    if options.out is None:
        write_result({"environment": machine, "rows": rows}, None)


if __name__ == "__main__":
    main()
