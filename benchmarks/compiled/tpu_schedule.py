"""States how many instructions the kernels of an operation take on a TPU, and the bytes they move.

    JAX_PLATFORMS=cpu PYTHONPATH=build/tpu:. python -m benchmarks.compiled.tpu_schedule

The kernels are compiled for TPUs, which needs their compiler (docs/howto/compile_ahead.md) but no
TPU. It writes the schedule of every kernel down: bundles of instructions, of which a core starts
one per cycle at best, and the share of each unit's places that they fill. Cycles are bundles times
programs of the grid, so a bound from below. They take loops inside a program for one round; for
these the bundles of the innermost loops are given too. Bytes are those of operands and results with
the last two axes filled up to whole tiles, as a TPU stores them.
"""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.absent_devices import TPUS, absent_device, kernels_for
from benchmarks.compiled.gated_delta import kernels_in
from benchmarks.machine import planned_megabytes, settings, write_result
from benchmarks.options import parse
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta import specs as gated_delta_specs
from pallas_kernels.slot_add import specs as slot_add_specs

_SPECS = {"gated_delta": gated_delta_specs.SPECS, "slot_add": slot_add_specs.SPECS}
_SCHEDULE = "-final_hlo-static-per-bundle-utilization.txt"
_BUNDLES = "-final_bundles.txt"
_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(LB)?.*?: .*$", re.MULTILINE)
_DELAY = 4
"""Bundles behind a branch that a core still starts."""
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_TILE = {4: 8, 2: 16, 1: 32}
"""Rows of a tile of 128 lanes, by bytes of a number."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles one operation, forward and backward, in one size."""

    op: Literal["gated_delta", "slot_add"] = "gated_delta"
    """The operation."""
    size: str = "paper"
    """Name of a size in the operation's specs.py."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of queries, keys and values; rows of a table are float32."""
    devices: tuple[str, ...] = ("v5e", "v6e")
    """v5e, v5p, v6e, 7x."""
    backend: Literal["pallas", "deltanet_tpu"] = "pallas"
    """Our kernels of the gated delta rule, or those of the package deltanet-tpu."""
    compile: bool = True
    """False: programs and bytes alone, which needs no compiler."""
    out: Path | None = None
    """File for the JSON; None: print it."""

    def __post_init__(self):
        names = [spec.name for spec in _SPECS[self.op]]
        if self.size not in names:
            raise ValueError(f"size={self.size!r} is none of {', '.join(names)}.")
        if unknown := [device for device in self.devices if device not in TPUS]:
            raise ValueError(f"devices={unknown} are none of {', '.join(TPUS)}.")


def measure(options: Options, device: str, folder: Path) -> list[dict[str, Any]]:
    """A row for each kernel; `folder` is where the compiler writes schedules.

    Raises:
      RuntimeError: the compiler wrote no schedule of a kernel.
    """
    call, arrays = _call(options)
    sharding = SingleDeviceSharding(absent_device(device)) if options.compile else None
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays
    )
    library = None if options.backend == "pallas" else options.backend
    with kernels_for(device, library=library):
        traced = jax.jit(call).trace(arrays)
        rows = [
            {"device": device, "size": options.size, "backend": options.backend, **_sizes(x)}
            for x in kernels_in(traced.jaxpr.jaxpr)
        ]
        if not options.compile:
            return rows
        for old in folder.glob("*"):
            old.unlink()
        compiled = traced.lower().compile()
    for row in rows:
        try:
            of_kernel = (_written(folder, row["kernel"], kind) for kind in (_SCHEDULE, _BUNDLES))
            used, code = (path.read_text() for path in of_kernel)
        except FileNotFoundError as error:
            raise RuntimeError(f"the compiler wrote no schedule of {row['kernel']}.") from error
        row["bundles"], row["used"] = schedule(used)
        row["million_cycles"] = row["programs"] * row["bundles"] / 1e6
        row["loops"] = loops(code)
    return [
        *rows,
        {
            **{"device": device, "size": options.size, "backend": options.backend},
            **{"kernel": "all", **planned_megabytes(compiled)},
        },
    ]


def schedule(text: str) -> tuple[int, dict[str, float]]:
    """Bundles, and the share of each unit's places that they fill."""
    lines = text.splitlines()
    units, places = lines[1].split(", "), np.array(lines[2].split(), np.int64)
    used = np.array([line.split() for line in lines[4:]], np.int64)
    shares = used.sum(axis=0) / places / len(used)
    return len(used), {unit: round(float(x), 3) for unit, x in zip(units, shares, strict=True)}


def loops(text: str) -> list[int]:
    """Bundles of each innermost loop, in the order of the code."""
    starts: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for bundle in _BUNDLE.finditer(text):
        address = int(bundle[1], 16)
        if bundle[2]:  # A loop's body begins here.
            starts |= dict.fromkeys(re.findall(r"Start region (\d+)", bundle[0]), address)
        for region in re.findall(r"sbr\.rel \([^)]*\) target = \$region(\d+)", bundle[0]):
            if region in starts:
                found.append((starts[region], address + _DELAY))
    return [
        end - start + 1
        for start, end in sorted(found)
        if not any(start < other <= end for other, _ in found)
    ]


def _written(folder: Path, kernel: str, kind: str) -> Path:
    """The file of `1795-gated_delta_forward.1-70-final_bundles.txt` and the like."""
    # Where a kernel has no name of its own in a gradient, JAX puts the transformation around it.
    named = re.compile(rf"\d+-(jvp_|transpose_)*{kernel}_*(\.\d+)?-\d+{re.escape(kind)}")
    for path in sorted(folder.iterdir()):
        if named.fullmatch(path.name):
            return path
    raise FileNotFoundError(kind)


def _call(options: Options) -> tuple[Callable[[Any], Any], Any]:
    spec = next(spec for spec in _SPECS[options.op] if spec.name == options.size)
    if options.op == "slot_add":
        arrays = jax.eval_shape(lambda: slot_add_specs.sample(spec, jnp.float32))
        add = slot_add_specs.COMPARISON.call
        return lambda arrays: add(spec, jnp.float32, **arrays, backend="pallas"), arrays

    def both(arrays: dict[str, jax.Array]) -> Any:
        outputs, back = jax.vjp(
            lambda arrays: chunk_gated_delta_rule(**arrays, backend=options.backend), arrays
        )
        return outputs, back(outputs)

    dtype = jnp.dtype(options.dtype)
    return both, jax.eval_shape(lambda: gated_delta_specs.sample(spec, dtype))


def _sizes(kernel: JaxprEqn) -> dict[str, Any]:
    arrays = (*kernel.invars, *kernel.outvars)
    return {
        "kernel": kernel.params["name"],
        "programs": int(np.prod(kernel.params["grid_mapping"].grid)),
        "megabytes": sum(map(_bytes, arrays)) / 1e6,
    }


def _bytes(x: Any) -> int:
    *outer, rows, columns = (1, 1, *x.aval.shape)
    size = x.aval.dtype.itemsize
    tile = _TILE[size]
    return int(np.prod(outer)) * -(-rows // tile) * tile * -(-columns // 128) * 128 * size


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        # The compiler reads it when it is loaded, so before the first device is asked for.
        os.environ["LIBTPU_INIT_ARGS"] = _FLAGS.format(folder)
        rows = [row for x in options.devices for row in measure(options, x, Path(folder))]
    write_result({"jax": jax.__version__, "options": settings(options), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
