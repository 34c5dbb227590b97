"""Times the selection of slots: the device's kernel and plain JAX, forward and with gradients.

    python -m benchmarks.kernels.selection --out benchmarks/results/selection_h100.json
    python -m benchmarks.kernels.selection --size tiny        # any CPU, kernels interpreted

`share_of_matmul` divides the rate of the products of queries and sub-keys, counted once, by the
rate of a large product in bfloat16 on an accelerator, in float32 on a CPU. The kernels need six
bfloat16 products for each float32 one.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.machine import environment, queued_seconds, settings, write_result
from benchmarks.options import parse
from pallas_kernels import dispatch
from pallas_kernels.dispatch import Backend
from pallas_kernels.product_top_k import select_slots
from pallas_kernels.product_top_k.specs import SPECS, TopKSpec, sample

SHAPES = {"paper": ("paper", "paper_pkm", "few_sub_keys", "million_slots"), "tiny": ("63_tokens",)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the selection of slots."""

    size: Literal["paper", "tiny"] = "paper"
    """paper: the shapes that the paper's models have, and other numbers of sub-keys; tiny: a shape
    for interpreted kernels."""
    passes: tuple[Literal["forward", "train"], ...] = ("forward", "train")
    """Forward alone, or forward + backward to queries and keys."""
    backends: tuple[Literal["pallas", "reference"], ...] = ("pallas", "reference")
    """pallas: the device's kernel; reference: plain JAX."""
    repeats: int = 9
    """Timed measurements; the median is reported."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def measure(options: Options, spec: TopKSpec, which: str, backend: Backend) -> dict[str, Any]:
    arrays = sample(spec, jnp.float32)

    def forward(queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights and ids of the slots."""
        found = select_slots(queries, keys, top_k=spec.top_k, score=spec.score, backend=backend)
        return found.weights, found.address.slot_ids

    def train(queries: jax.Array, keys: jax.Array) -> Any:
        weights, pull, ids = jax.vjp(forward, queries, keys, has_aux=True)
        return ids, pull(weights)

    functions: dict[str, Callable[..., Any]] = {"forward": forward, "train": train}
    compiled = jax.jit(functions[which]).lower(**arrays).compile()
    seconds, spread = queued_seconds(lambda: compiled(**arrays), repeats=options.repeats)
    flops = 2 * spec.tokens * spec.heads * spec.subkeys * spec.key
    return {"seconds": seconds, "spread": spread, "gigaflops_per_second": flops / seconds / 1e9}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    machine = environment()
    rate = machine.get("bfloat16_matmul_gigaflops", machine["matmul_gigaflops"])
    rows: list[dict[str, Any]] = []
    result = {"environment": machine, "options": settings(options), "rows": rows}
    interpreted = options.size == "tiny" and jax.default_backend() == "cpu"
    with dispatch.interpret_kernels("tpu") if interpreted else contextlib.nullcontext():
        for spec in (spec for spec in SPECS if spec.name in SHAPES[options.size]):
            for which in options.passes:
                for backend in options.backends:
                    choice = {"shape": spec.name, "passes": which, "backend": backend}
                    row = measure(options, spec, which, backend)
                    share = {"share_of_matmul": row["gigaflops_per_second"] / rate}
                    rows.append(choice | row | share)
                    print(f"{choice}: {1e3 * row['seconds']:.3f} ms", file=sys.stderr)
                    if options.out is not None:
                        write_result(result, options.out)
    if options.out is None:
        write_result(result, None)


if __name__ == "__main__":
    main()
