"""Counts what a device launches for each chunk of a memory, by the code compiled for it.

    PYTHONPATH=build/cuda:. python -m benchmarks.compiled.launches --out launches_h100.json

A memory's forward and backward pass at the paper's widths is compiled for the device, which needs
the device's compiler (docs/howto/compile_ahead.md) but not the device. A loop over the chunks
becomes a `while`; every fusion, kernel, copy and product in its body is one launch at least. XLA
counts a nested loop once.
"""

import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.absent_devices import absent_device, kernels_for
from benchmarks.compiled.traffic import COMPUTATION, LAUNCHING
from benchmarks.machine import settings, write_result
from benchmarks.options import parse
from fwpkm_jax.rules import SDM, FwPKM


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A memory's passes, and the device that they are compiled for."""

    device: Literal["cpu", "h100"] = "h100"
    """Device to compile for."""
    subkeys: int = 512
    """Sub-keys per codebook."""
    dim: int = 512
    """Width of keys and values."""
    chunk_size: int = 512
    """Tokens between two writes."""
    batch: int = 8
    """Sequences, which share one memory."""
    chunks: int = 4
    """Chunks of a sequence."""
    out: Path | None = None
    """File for the JSON; None: print it."""


@dataclass(frozen=True, kw_only=True)
class Options(Passes):
    """Compiles a memory's passes and counts launches by loop."""

    rule: Literal["fwpkm", "sdm"] = "fwpkm"
    """FwPKM, or Sparse Delta Memory with 64 writes and 64 reads of a token."""


def compiled_text(options: Passes, rule_name: Literal["fwpkm", "sdm"] = "fwpkm") -> str:
    """The gradients by queries, values and gates, and the written memory, compiled."""
    rule = SDM(num_subkeys=options.subkeys, value_dim=options.dim)
    if rule_name == "fwpkm":
        rule = FwPKM(num_subkeys=options.subkeys, key_dim=options.dim, value_dim=options.dim)
    tokens = (options.batch, options.chunks * options.chunk_size)
    sharding = None
    if options.device != "cpu":
        sharding = SingleDeviceSharding(absent_device(options.device))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def train(memory: Any, query, value, gate, cotangent) -> Any:
        def loss(query, value, gate):
            sequence = rule.sequence(query, value, gate=gate, chunk_size=options.chunk_size)
            out = rule.run(memory, sequence, chunk_size=options.chunk_size)
            return jnp.sum(out.output * cotangent), out.memory

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, value, gate)

    memory = jax.eval_shape(lambda: rule.init(jax.random.key(0)))
    arguments = (
        jax.tree.map(lambda x: array(*x.shape), memory),
        array(*tokens, 1, rule.key_dim),
        array(*tokens, options.dim),
        array(*tokens),
        array(*tokens, options.dim),
    )
    jitted = jax.jit(train, donate_argnums=0)
    devices = contextlib.nullcontext()
    if options.device != "cpu":
        devices = kernels_for(options.device)
    with devices:
        text = jitted.trace(*arguments).lower().compile().as_text()
    assert text is not None
    return text


def loops(text: str) -> list[dict[str, Any]]:
    """For every loop of a compiled program: its launches, and its Pallas kernels by name.

    Each has `loop`, the body's name, `launches`, `by_kind` and `kernels`.
    """
    names = list(COMPUTATION.finditer(text))
    ends = [match.start() for match in names[1:]] + [len(text)]
    bodies = {m.group(1): text[m.end() : end] for m, end in zip(names, ends, strict=True)}
    found = []
    for name in sorted(set(re.findall(r"body=%?([\w.\-]+)", text))):
        kinds = Counter(
            kind
            for kind in re.findall(r"^\s+(?:ROOT )?%[\w.\-]+ = .*? ([\w\-]+)\(", bodies[name], re.M)
            if kind in LAUNCHING
        )
        # A kernel that writes into a loop's output stands in a computation of its own.
        called = re.findall(r"calls=%?([\w.\-]+)", bodies[name])
        kernels = Counter(
            kernel
            for part in (bodies[name], *(bodies[one] for one in called))
            for kernel in re.findall(r'mosaic_gpu.*?op_name="[^"]*?/([\w]+)/mpmd_map"', part)
        )
        found.append(
            {
                "loop": name,
                "launches": sum(kinds.values()),
                "by_kind": dict(kinds),
                "kernels": dict(sorted(kernels.items())),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows = loops(compiled_text(options, options.rule))
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    result = {"jax": jax.__version__, "options": settings(options), "rows": rows}
    write_result(result, options.out)


if __name__ == "__main__":
    main()
