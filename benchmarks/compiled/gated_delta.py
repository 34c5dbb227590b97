"""States the bytes, registers and instructions of the gated delta rule's kernels on an H100.

    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. python -m benchmarks.compiled.gated_delta
    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. python -m benchmarks.compiled.gated_delta \
        --backend jla --dtypes bfloat16

A forward and backward pass is traced, and compiled for the H100, which needs its compiler
(docs/howto/compile_ahead.md) but not the device. Bytes are those of every kernel's operands and
results, each counted once. Registers and spills are the assembler's report, instructions and
barriers those of its input. Launches are the instructions of the compiled program that a device
starts, XLA's own included, and its bytes are those of their operands and results.
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
from benchmarks.compiled.assembler import compiled_and_report
from benchmarks.compiled.traffic import Sizes, launches
from benchmarks.machine import planned_megabytes, settings, write_result
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
    backend: Literal["pallas", "jla"] = "pallas"
    """Our kernels, or those of the package jax-linear-attention, which take bfloat16."""
    documents: bool = False
    """Whether rows hold documents of 512 tokens."""
    compile: bool = True
    """False: bytes alone, which needs no compiler."""
    out: Path | None = None
    """File for the JSON; None: print it."""

    def __post_init__(self):
        if self.size not in _NAMES:
            raise ValueError(f"size={self.size!r} is none of {', '.join(_NAMES)}.")
        if self.backend == "jla" and "float32" in self.dtypes:
            raise ValueError("backend=jla takes bfloat16 alone; add --dtypes bfloat16.")


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

    if options.documents:
        shape = (spec.batch, spec.length)
        arrays["starts"] = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=sharding)

    def both(arrays: dict[str, jax.Array]) -> Any:
        starts = arrays.pop("starts", None)
        outputs, back = jax.vjp(
            lambda arrays: chunk_gated_delta_rule(**arrays, starts=starts, backend=options.backend),
            arrays,
        )
        return outputs, back(outputs)

    library = None if options.backend == "pallas" else options.backend
    with kernels_for("h100", library=library):
        traced = jax.jit(both).trace(arrays)
        compiled, report = compiled_and_report(traced) if options.compile else (None, {})
    report = {name.removeprefix(_PREFIX): row for name, row in report.items()}
    sizes = kernel_bytes(traced.jaxpr.jaxpr)
    if options.compile and report.keys() != sizes.keys():
        raise RuntimeError(f"the assembler reports {[*report]} of the kernels {[*sizes]}.")
    call = {"backend": options.backend, "size": options.size, "documents": options.documents}
    rows: list[dict[str, Any]] = [
        call | {"kernel": name, "dtype": dtype, "megabytes": size / 1e6} | report.get(name, {})
        for name, size in sizes.items()
    ]
    whole = {"kernel": "all", "dtype": dtype, "megabytes": sum(x["megabytes"] for x in rows)}
    if compiled is not None:
        whole["registers"] = max(row["registers"] for row in rows)
        whole["spill_store_bytes"] = sum(row["spill_store_bytes"] for row in rows)
        whole |= _program(compiled)
    return [*rows, call | whole]


def _program(compiled: Any) -> dict[str, Any]:
    """Launches of the whole program, the bytes that they move, and the memory that it needs."""
    turns = launches(compiled.as_text(), Sizes(tokens=1, places=1, value=0, distinct=0.0)).values()
    return {
        "launches": sum(times * len(found) for times, found in turns),
        "program_megabytes": sum(times * x.bytes for times, found in turns for x in found) / 1e6,
        **planned_megabytes(compiled),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = [row for dtype in options.dtypes for row in measure(options, dtype)]
    write_result({"jax": jax.__version__, "options": settings(options), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
