"""Compiles a step for many absent devices and reports each one's memory and traffic.

    PYTHONPATH=build/tpu:. python -m benchmarks.compiled.scaling --device v5e --data 64 --fsdp 4

The device's compiler must be installed (docs/howto/compile_ahead.md). Every row is one mesh;
`--out` keeps rows of other meshes that are already in the file. Programs are compiled but not run,
so the results say nothing about speed. `--sequence` gives each device a part of every sequence, and
`--work read` reads and writes memories and takes the loss, without gradients.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.compiled.absent_devices import absent_devices
from benchmarks.compiled.collectives import collectives, sent_by_axes, sent_by_layers
from benchmarks.machine import planned_megabytes, settings, write_result
from benchmarks.options import parse
from benchmarks.speed.models import Size, model_of
from fwpkm_jax.layers.partition import BATCH, MemoryLayout, MeshConfig, Partition
from fwpkm_jax.paper.models import ABLATED
from fwpkm_jax.training.losses import readout_loss
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.sharding import make_partition, state_shardings
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from pallas_kernels import dispatch

TOPOLOGIES = {
    ("v5e", 256): "v5e:16x16",
    ("v5e", 8): "v5e:2x4",
    ("v5p", 256): "v5p:8x8x4",
    ("v5p", 16): "v5p:2x2x4",
    ("v5p", 8): "v5p:2x2x2",
    ("h100", 256): "h100:32x8x1",
    ("h100", 8): "h100:1x8x1",
}
"""By kind and number of devices: slices of two kinds of TPU, and machines with 8 GPUs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles the paper's 12-layer model for a mesh of absent devices."""

    device: Literal["v5e", "v5p", "h100", "cpu"] = "v5e"
    """Kind of the devices, of which the mesh takes 8 or 256, of v5p also 16. cpu: the devices of
    this process, including simulated ones."""
    name: str = ABLATED
    """The paper's model by name."""
    size: Size = "paper"
    """tiny: 4 narrow layers; paper: the paper's widths."""
    data: int = 32
    """Devices along the axis of independent parts of the batch."""
    fsdp: int = 8
    """Devices along the axis over which slow weights are sharded."""
    model: int = 1
    """Devices along the axis over which heads are split."""
    sequence: int = 1
    """Devices along the axis over which the tokens of each sequence are split."""
    memory: MemoryLayout = "columns"
    """independent: one memory per device; otherwise one per part along `data`."""
    sequences: int = 4
    """Sequences per step of each part along `data` and `fsdp`."""
    length: int = 4096
    """Tokens per sequence."""
    work: Literal["train", "read"] = "train"
    """train: a training step. read: the loss of a forward pass, and what it wrote."""
    layers: int = 12
    """Number of layers, from the first on."""
    num_subkeys: int = 512
    """Sub-keys of the memories and of the product-key memory; 4096 gives 16.8 million slots."""
    out: Path | None = None
    """JSON file of rows; None: print the row."""


def compile_step(options: Options, devices: list[Any]) -> tuple[Any, dict[str, int]]:
    """The compiled step and the sizes of its mesh."""
    model = model_of(options.name, options.size, layers=options.layers)
    rule = dataclasses.replace(model.fast_weight.rule, num_subkeys=options.num_subkeys)
    model = dataclasses.replace(
        model,
        fast_weight=dataclasses.replace(model.fast_weight, rule=rule),
        pkm=dataclasses.replace(model.pkm, num_subkeys=options.num_subkeys),
    )
    mesh = MeshConfig(
        **{axis: getattr(options, axis) for axis in ("data", "fsdp", "model", "sequence")},
        memory=options.memory,
    )
    partition = make_partition(mesh, devices)
    assert partition is not None
    parts = partition.size(*partition.group_axes)
    memory = MemoryConfig(groups=parts, lifetime="carried")
    optimizer = make_optimizer(OptimizerConfig(), steps=1000)
    step = make_train_step(
        model_graph(model),
        optimizer,
        schedule=learning_rate_schedule(OptimizerConfig(), steps=1000),
        micro_batches=1,
        memory=memory,
        remat="block",
        partition=partition,
    )
    state = jax.eval_shape(lambda: init_state(model, memory=memory, optimizer=optimizer, seed=0))
    layout = state_shardings(partition, state, graphdef=model_graph(model))
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, layout
    )
    batch, length = options.sequences * partition.size(*BATCH), options.length
    by_sequence = partition.sharding(BATCH)
    arrays = {
        "tokens": jax.ShapeDtypeStruct((batch, length + 1), jnp.int32, sharding=by_sequence),
        "loss_weight": jax.ShapeDtypeStruct((batch, length), jnp.float32, sharding=by_sequence),
    }
    traced: tuple[Any, ...] = (state, arrays)
    if options.work == "read":
        step = jax.jit(functools.partial(read, model_graph(model), partition))
        traced = (state.params, state.memory, arrays)
    kernels = contextlib.nullcontext()
    if options.device != "cpu":
        kernels = dispatch.compile_kernels("gpu" if options.device == "h100" else "tpu")
    with kernels:
        compiled = step.trace(*traced).lower().compile()
    return compiled, dict(partition.mesh.shape)


def read(
    graphdef: Any, partition: Partition, params: Any, memory: Any, batch: dict[str, jax.Array]
) -> tuple[jax.Array, Any]:
    """The summed loss of a batch and the memories that it wrote."""
    model = nnx.merge(graphdef, params)
    tokens = batch["tokens"]
    hidden = model.hidden(tokens[:, :-1], memory, partition=partition)
    losses = readout_loss(
        model,
        hidden.x,
        tokens[:, 1:],
        batch["loss_weight"],
        block=2048,
        token_bias=hidden.token_bias,
        partition=partition,
    )
    return losses, hidden.memory


def measure(options: Options) -> dict[str, Any]:
    """The row of one mesh."""
    began = time.perf_counter()
    count = options.data * options.fsdp * options.model * options.sequence
    if options.device == "cpu":
        devices = jax.devices()
    elif (options.device, count) in TOPOLOGIES:
        devices = list(absent_devices(TOPOLOGIES[options.device, count]))
    else:
        raise ValueError(
            f"data={options.data} x fsdp={options.fsdp} x model={options.model} x "
            f"sequence={options.sequence} is {count} devices; choose them to give 256 or 8, of v5p "
            "also 16."
        )
    compiled, mesh = compile_step(options, devices)
    planned = planned_megabytes(compiled)
    found = collectives(compiled.as_text())
    chosen = Counter(
        {f"{op}: {how} ({why})": n for (op, how, why), n in dispatch.decisions.items()}
    )
    return {
        "jax": jax.__version__,
        "options": settings(options),
        "slots": options.num_subkeys**2,
        "argument_megabytes": planned["argument"],
        "peak_megabytes": planned["peak"],
        "temporary_megabytes": planned["temporary"],
        "sent_megabytes": {
            axes: {kind: sent / 1e6 for kind, sent in kinds.items()}
            for axes, kinds in sent_by_axes(found, mesh).items()
        },
        "sent_megabytes_by_layer": {
            layer: sent / 1e6 for layer, sent in sent_by_layers(found, mesh).items()
        },
        "collectives": sum(one.times for one in found),
        "implementations": dict(sorted(chosen.items())),
        "compile_seconds": time.perf_counter() - began,
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    row = json.loads(json.dumps(measure(options)))
    rows = []
    if options.out is not None and options.out.is_file():
        rows = json.loads(options.out.read_text(encoding="utf-8"))
    rows = [old for old in rows if old["options"] != row["options"]] + [row]
    write_result(rows, options.out)


if __name__ == "__main__":
    main()
