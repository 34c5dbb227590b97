r"""Reports the memory of a training step from its traced and compiled code, without running it.

    python -m benchmarks.compiled.step_memory --out benchmarks/results/step_memory_cpu.json
    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. \
        python -m benchmarks.compiled.step_memory --device h100 --layers 12

The second line needs the device's compiler (docs/howto/compile_ahead.md).
`kept_megabytes` is what the forward pass stores for the backward pass besides parameters, memories
and batch, with the device's kernels. `--no-compile` reports this alone and needs no compiler.
`temporary_megabytes` is what the compiled step needs besides its state and batch, `host_megabytes`
what it puts into the host's memory. `modelled_ms` is the time of its launches on an H100, as
`benchmarks.compiled.account` models it; copies from and to the host's memory are not part of it.
Four layers have one layer of each kind and compile in a third of the time of twelve.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.absent_devices import absent_device, kernels_for
from benchmarks.compiled.account import Options as AccountOptions
from benchmarks.compiled.account import account
from benchmarks.compiled.executables import CUBLAS
from benchmarks.machine import planned_megabytes, settings, write_result
from benchmarks.options import parse
from benchmarks.speed.models import Size, model_of, remat_of, train_of
from benchmarks.speed.train_step import make_step
from fwpkm_jax.training.losses import readout_loss
from fwpkm_jax.training.state import model_graph, trained_part, with_trained


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles training steps of the paper's model and reports their memory."""

    device: Literal["cpu", "h100", "v5e", "v5p", "v6e"] = "cpu"
    """Device to compile for."""
    models: tuple[str, ...] = ("gdn_swa__fwpkm2_6_10", "gdn_swa__fwpkm2_6_10__remat")
    """The paper's models by name, with endings as in `benchmarks.speed.train_step`."""
    layers: int = 4
    """Number of layers, from the first on, with the memories that they have."""
    batch: int = 8
    """Sequences per step, which share one carried memory."""
    length: int = 4096
    """Tokens per sequence."""
    loss_block: int = 2048
    """Tokens whose logits exist at once."""
    compile: bool = True
    """False: the step is only traced."""
    size: Size = "paper"
    """tiny: 4 narrow layers; paper: the paper's widths."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def measure(options: Options, name: str) -> dict[str, Any]:
    """One model's memory in MB, and how long its step took to compile."""
    contexts = contextlib.ExitStack()
    sharding = None
    if options.device != "cpu":
        if options.compile:
            sharding = SingleDeviceSharding(absent_device(options.device))
        contexts.enter_context(kernels_for(options.device))
    with contexts:
        model = model_of(name, options.size, layers=options.layers)
        step, make_state = make_step(options.loss_block, name, model)
        tokens = (options.batch, options.length)
        batch = {
            "tokens": jax.ShapeDtypeStruct((tokens[0], tokens[1] + 1), jnp.int32),
            "loss_weight": jax.ShapeDtypeStruct(tokens, jnp.float32),
        }
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (jax.eval_shape(make_state), batch),
        )
        kept: dict[str, Any] = {
            "model": name,
            "kept_megabytes": kept_bytes(options, name, *arguments) / 1e6,
        }
        if not options.compile:
            return kept
        began = time.perf_counter()
        flags = CUBLAS if options.device == "h100" else {}
        compiled = step.trace(*arguments).lower().compile(compiler_options=flags)
    planned = planned_megabytes(compiled)
    if options.device == "h100":
        sizes = AccountOptions(batch=options.batch)
        kept["modelled_ms"] = account(sizes, compiled.as_text())["total"]["h100_ms"]
    return {
        **kept,
        "host_megabytes": compiled.memory_analysis().host_temp_size_in_bytes / 1e6,
        "argument_megabytes": planned["argument"],
        "temporary_megabytes": planned["temporary"],
        "peak_megabytes": planned["peak"],
        "compile_seconds": time.perf_counter() - began,
    }


def kept_bytes(options: Options, name: str, state: Any, batch: Any) -> int:
    """Device bytes of the arrays that go from the forward pass of the loss to its backward pass."""
    graphdef = model_graph(model_of(name, options.size, layers=options.layers))
    remat, train = remat_of(name), train_of(name)

    def backward(params, memory, tokens, weights):
        def loss(trained):
            model = nnx.merge(graphdef, with_trained(params, trained, train))
            hidden = model.hidden(tokens[:, :-1], memory, remat=remat)
            return readout_loss(model, hidden.x, tokens[:, 1:], weights, block=options.loss_block)

        return jax.vjp(loss, trained_part(params, train))[1]  # A pytree of what it keeps.

    jaxpr = jax.make_jaxpr(backward)(
        state.params, state.memory, batch["tokens"], batch["loss_weight"]
    ).jaxpr
    given = set(jaxpr.invars)
    kept = {x for x in jaxpr.outvars if isinstance(x, jax.extend.core.Var) and x not in given}
    arrays: list[Any] = [x.aval for x in kept]
    arrays = [x for x in arrays if x.memory_space != jax.memory.Space.Host]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    rows: list[dict[str, Any]] = []
    result = {"jax": jax.__version__, "options": settings(options), "rows": rows}
    for name in options.models:
        rows.append(measure(options, name))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.out is not None:
            write_result(result, options.out)
    if options.out is None:
        write_result(result, None)


if __name__ == "__main__":
    main()
