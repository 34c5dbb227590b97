"""States the bytes, registers, spills and instructions of the gated delta rule's kernels on an H100.

    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. python -m benchmarks.compiled.gated_delta

A forward and backward pass is traced, and compiled for the H100, which needs its compiler
(docs/howto/compile_ahead.md) but not the device. Bytes are those of every kernel's operands and
results, each counted once. Registers and spills are the assembler's report, instructions and
barriers those of its input.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.absent_devices import absent_device, kernels_for
from benchmarks.compiled.assembler import assembled
from benchmarks.machine import settings, write_result
from benchmarks.options import parse
from pallas_kernels.gated_delta import chunk_gated_delta_rule
from pallas_kernels.gated_delta.specs import SPECS, sample

_PREFIX = "gated_delta_"
_NAMES = tuple(spec.name for spec in SPECS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Reports on the kernels of one size, by dtype of queries, keys and values."""

    size: str = "paper"
    """Name of a size in pallas_kernels/gated_delta/specs.py."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes of queries, keys and values."""
    compile: bool = True
    """False: bytes alone, which needs no compiler."""
    out: Path | None = None
    """File for the JSON; None: print it."""

    def __post_init__(self):
        if self.size not in _NAMES:
            raise ValueError(f"size={self.size!r} is none of {', '.join(_NAMES)}.")


def kernel_bytes(jaxpr: Jaxpr) -> dict[str, int]:
    """Bytes of each kernel's operands and results, by its name."""
    found: dict[str, int] = {}
    for equation in kernels_in(jaxpr):
        name = equation.params["name"].removeprefix(_PREFIX)
        arrays: list[Any] = [x.aval for x in (*equation.invars, *equation.outvars)]
        found[name] = sum(x.size * x.dtype.itemsize for x in arrays)
    return found


def kernels_in(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The calls of kernels, in the order of the program: a TPU's and a GPU's."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("mpmd_map", "pallas_call"):
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from kernels_in(inner)


def measure(options: Options, dtype: str) -> list[dict[str, Any]]:
    """A row for each kernel, in the order in which they run, and the bytes of all.

    Raises:
      RuntimeError: the assembler does not report a kernel.
    """
    spec = SPECS[_NAMES.index(options.size)]
    sharding = SingleDeviceSharding(absent_device("h100")) if options.compile else None
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: sample(spec, jnp.dtype(dtype))),
    )

    def both(arrays: dict[str, jax.Array]) -> Any:
        outputs, back = jax.vjp(
            lambda arrays: chunk_gated_delta_rule(**arrays, backend="pallas"), arrays
        )
        return outputs, back(outputs)

    with kernels_for("h100"):
        traced = jax.jit(both).trace(arrays)
        report = assembled(traced) if options.compile else {}
    report = {name.removeprefix(_PREFIX): row for name, row in report.items()}
    sizes = kernel_bytes(traced.jaxpr.jaxpr)
    if options.compile and report.keys() != sizes.keys():
        raise RuntimeError(f"the assembler reports {[*report]} of the kernels {[*sizes]}.")
    rows: list[dict[str, Any]] = [
        {"kernel": name, "dtype": dtype, "megabytes": size / 1e6} | report.get(name, {})
        for name, size in sizes.items()
    ]
    return [
        *rows,
        {"kernel": "all", "dtype": dtype, "megabytes": sum(x["megabytes"] for x in rows)},
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = [row for dtype in options.dtypes for row in measure(options, dtype)]
    write_result({"jax": jax.__version__, "options": settings(options), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
