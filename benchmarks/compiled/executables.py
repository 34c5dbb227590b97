"""Makes executables of whole training steps for a device that is not here, and loads them there.

    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. \\
        python -m benchmarks.compiled.executables --out build/exe

writes a file for each model: the step's machine code, kernels included, compressed, with what the
loading process needs to call it. A process on the device that loads it neither traces nor compiles
the step, nor checks its kernels. `--topology` names the results of `benchmarks.bring_up` on such
a machine; without it the topology is that of `benchmarks/compiled/h100.txtpb`.

By default products are cuBLASLt's, because a compiler without a device cannot choose the tiles of
its own. `python -m benchmarks.bring_up --executables build/exe` loads and times the files.
"""

import base64
import contextlib
import importlib
import json
import lzma
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable, topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.bring_up import sources
from benchmarks.bring_up.files import read_object
from benchmarks.bring_up.steps import ENDING
from benchmarks.compiled.absent_devices import absent_device, kernels_for
from benchmarks.machine import planned_megabytes
from benchmarks.options import parse
from benchmarks.speed.models import Size, model_of
from benchmarks.speed.train_step import default_length, make_step

CUBLAS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles training steps and writes their executables."""

    out: Path
    """Folder for the files."""
    device: Literal["cpu", "h100"] = "h100"
    """Device to compile for; cpu: this one."""
    models: tuple[str, ...] = ("gdn", "gdn__fwpkm2_6_10")
    """The paper's models by name."""
    size: Size = "paper"
    """tiny: 4 narrow layers; paper: the paper's widths."""
    batch: int = 8
    """Sequences per step."""
    length: int | None = None
    """Tokens per sequence; None: 4096 (tiny: 256)."""
    loss_block: int = 2048
    """Tokens whose logits exist at once."""
    triton: bool = False
    """Whether XLA may multiply by Triton's kernels, with tiles that no device has tried."""
    topology: Path | None = None
    """`results.json` with the device's own topology; None: the description beside this file."""


def compile_step(options: Options, name: str) -> Any:
    """The compiled training step of a model for the device."""
    contexts, sharding, flags = contextlib.ExitStack(), None, {}
    topology = _topology(options)
    if options.device != "cpu":
        sharding = SingleDeviceSharding(_device(options, topology))
        contexts.enter_context(kernels_for(options.device))
        flags = {} if options.triton else CUBLAS
    with contexts:
        step, make_state = make_step(options.loss_block, name, model_of(name, options.size))
        length = options.length or default_length(options.size)
        batch = {
            "tokens": jax.ShapeDtypeStruct((options.batch, length + 1), jnp.int32),
            "loss_weight": jax.ShapeDtypeStruct((options.batch, length), jnp.float32),
        }
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (jax.eval_shape(make_state), batch),
        )
        return step.trace(*arguments).lower().compile(compiler_options=flags)


def _device(options: Options, topology: bytes | None) -> Any:
    device = absent_device(options.device)  # Says which package is missing.
    if topology is None:
        return device
    return topologies.TopologyDescription.deserialize(  # pyright: ignore[reportAttributeAccessIssue]
        topology
    ).devices[0]


def _topology(options: Options) -> bytes | None:
    """The bytes that a real device's description has.

    Raises:
      SystemExit: the file has none.
    """
    if options.topology is None:
        return None
    found = read_object(options.topology)
    kept = found.get("device", {}).get("result", found).get("topology")
    if not isinstance(kept, str):
        raise SystemExit(f"--topology {options.topology}: the file has no bytes of a topology.")
    return base64.b64decode(kept)


def write(path: Path, compiled: Any, **facts: Any) -> int:
    """Writes a compiled function that `load` reads; returns the bytes of the file.

    Args:
      path: file to write.
      compiled: `jax.stages.Compiled`.
      **facts: JSON that `load` returns with it.
    """
    code, in_tree, out_tree = serialize_executable.serialize(compiled)
    kept = {"facts": facts, "code": code, "in_tree": in_tree, "out_tree": out_tree}
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(pickle.dumps(kept))
    path.write_bytes(packed)
    return len(packed)


def load(path: Path) -> tuple[Any, dict[str, Any]]:
    """The compiled function of a file for this process's device, and the facts kept with it.

    A file runs code when it is read: load only what you made.
    """
    if jax.default_backend() == "gpu":
        # It links the functions that compiled kernels call; tracing a kernel would import it.
        importlib.import_module("jax.experimental.mosaic.gpu")
    kept = pickle.loads(lzma.decompress(path.read_bytes()))
    compiled = serialize_executable.deserialize_and_load(
        kept["code"], kept["in_tree"], kept["out_tree"], execution_devices=jax.devices()[:1]
    )
    return compiled, kept["facts"]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    for name in options.models:
        model_of(name, options.size)  # A misspelt name is refused before anything is compiled.
    for name in options.models:
        began = time.perf_counter()
        compiled = compile_step(options, name)
        facts = {
            "model": name,
            "size": options.size,
            "jax": jax.__version__,
            "source": sources.of_step(),
            "planned": planned_megabytes(compiled),
        }
        path = options.out / f"{name}{ENDING}"
        size = write(path, compiled, **facts)
        row = {**facts, "megabytes": size / 1e6, "seconds": time.perf_counter() - began}
        print(json.dumps(row), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
