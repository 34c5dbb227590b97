"""Checks that a step gives the same bits twice, and measures its distance to float64.

python -m benchmarks.kernels.determinism --out benchmarks/results/determinism.json
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import environment, settings, write_result
from benchmarks.options import parse
from fwpkm_jax.rules import FwPKM


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs FwPKM forward and backward twice, and once in float64 on the CPU."""

    size: Literal["tiny", "paper"] = "tiny"
    """tiny: 16**2 slots; paper: 512**2 slots, widths of 512."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def gradients(rule: FwPKM, chunk_size: int, memory: Any, query: jax.Array, value: jax.Array):
    """Output, written memory, and the gradients of a scalar of the output."""

    def loss(query, value):
        sequence = rule.sequence(query, value, chunk_size=chunk_size)
        out = rule.run(memory, sequence, chunk_size=chunk_size)
        return jnp.sum(out.output**2), (out.output, out.memory)

    grads, (output, written) = jax.grad(loss, argnums=(0, 1), has_aux=True)(query, value)
    return {"output": output, "memory": written, "gradients": grads}


def compare(*, tiny: bool) -> list[dict[str, Any]]:
    """A row for each array of two equal runs and of one in float64."""
    dim, subkeys, chunk = (32, 16, 32) if tiny else (512, 512, 512)
    rule = FwPKM(num_subkeys=subkeys, key_dim=dim, value_dim=dim)
    length = 4 * chunk
    memory = rule.init(jax.random.key(0))
    # A few queries repeated many times give hot slots, whose sums depend on the order of additions.
    few = jax.random.normal(jax.random.key(1), (8, 1, dim), jnp.float32)
    chosen = jax.random.randint(jax.random.key(2), (2, length), 0, 8)
    noise = jax.random.normal(jax.random.key(3), (2, length, 1, dim), jnp.float32)
    query = few[chosen] + 0.3 * noise
    value = jax.random.normal(jax.random.key(4), (2, length, dim), jnp.float32)
    run = jax.jit(gradients, static_argnums=(0, 1))
    first = jax.tree.map(np.asarray, run(rule, chunk, memory, query, value))
    second = jax.tree.map(np.asarray, run(rule, chunk, memory, query, value))
    with jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (memory, query, value))
        exact = jax.tree.map(np.asarray, run(rule, chunk, *jax.tree.map(jnp.asarray, wide)))

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    leaves = jax.tree_util.tree_leaves_with_path(first)
    return [
        {
            "array": jax.tree_util.keystr(path),
            "bitwise_equal": bool(np.array_equal(one, two)),
            "error_against_float64": relative(one, reference),
        }
        for (path, one), two, reference in zip(
            leaves, jax.tree.leaves(second), jax.tree.leaves(exact), strict=True
        )
    ]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    with jax.enable_x64(True):
        rows = compare(tiny=options.size == "tiny")
    result = {"environment": environment(), "options": settings(options), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
