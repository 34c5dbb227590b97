"""A training step over many devices, compiled without them: memory and traffic of each.

    PYTHONPATH=build/tpu:. python benchmarks/scaling.py --device v5e --data 64 --fsdp 4

The device's compiler must be installed (docs/howto/compile_ahead.md). Every row is one mesh;
`--out` keeps the rows of other meshes that the file holds. The programs are compiled and not run,
so no number here is a speed.
"""

import dataclasses
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from machine import settings

from fwpkm_jax.analysis.collectives import collectives, sent_by_axes
from fwpkm_jax.layers.partition import BATCH, MemoryLayout, MeshConfig
from fwpkm_jax.paper import ABLATED, paper_model
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.sharding import make_partition, state_shardings
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from pallas_kernels import dispatch
from tests.aot.devices import absent_devices

TOPOLOGIES = {
    ("v5e", 256): "v5e:16x16",
    ("v5e", 8): "v5e:2x4",
    ("v5p", 256): "v5p:8x8x4",
    ("v5p", 8): "v5p:2x2x2",
    ("h100", 256): "h100:32x8x1",
    ("h100", 8): "h100:1x8x1",
}
"""256 devices or 8: slices of two kinds of TPU, and machines with 8 GPUs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compiles the paper's 12-layer model for a mesh of absent devices."""

    device: Literal["v5e", "v5p", "h100"] = "v5e"
    """This kind; 256 of them or 8, as the mesh has."""
    data: int = 32
    """Axis of independent parts of the batch."""
    fsdp: int = 8
    """Axis that shares slow weights."""
    model: int = 1
    """Axis that splits heads."""
    memory: MemoryLayout = "columns"
    """independent: a memory per device; else one per part along `data`."""
    sequences: int = 4
    """Per device and step, of 4,096 tokens."""
    layers: int = 12
    """The paper's first layers."""
    num_subkeys: int = 512
    """Of the memories and the product-key memory; 4096 gives 16.8 million slots."""
    out: Path | None = None
    """File of rows; None: print the row."""


def compile_step(options: Options, devices: list[Any]) -> tuple[Any, dict[str, int]]:
    """The compiled step and the sizes of its mesh."""
    model = paper_model(ABLATED)
    cut = {
        name: tuple(i for i in getattr(model, name) if i < options.layers)
        for name in ("memory_layers", "pkm_layers")
    }
    rule = dataclasses.replace(model.fast_weight.rule, num_subkeys=options.num_subkeys)
    model = dataclasses.replace(
        model,
        **cut,
        mixers=model.mixers[: options.layers],
        fast_weight=dataclasses.replace(model.fast_weight, rule=rule),
        pkm=dataclasses.replace(model.pkm, num_subkeys=options.num_subkeys),
    )
    mesh = MeshConfig(
        data=options.data, fsdp=options.fsdp, model=options.model, memory=options.memory
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
    layout = state_shardings(partition, state, rule=rule, optimizer=optimizer)
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, layout
    )
    batch, length = options.sequences * partition.size(*BATCH), 4096
    by_sequence = partition.sharding(BATCH)
    arrays = {
        "tokens": jax.ShapeDtypeStruct((batch, length + 1), jnp.int32, sharding=by_sequence),
        "loss_weight": jax.ShapeDtypeStruct((batch, length), jnp.float32, sharding=by_sequence),
    }
    kernel = "gpu" if options.device == "h100" else "tpu"
    with dispatch.compile_kernels(kernel):
        compiled = step.trace(state, arrays).lower().compile()
    return compiled, dict(partition.mesh.shape)


def measure(options: Options) -> dict[str, Any]:
    """One mesh's row."""
    began = time.perf_counter()
    count = options.data * options.fsdp * options.model
    if (options.device, count) not in TOPOLOGIES:
        raise ValueError(
            f"data={options.data} x fsdp={options.fsdp} x model={options.model} is {count} "
            "devices; choose them to give 256 or 8."
        )
    devices = list(absent_devices(TOPOLOGIES[options.device, count]))
    compiled, mesh = compile_step(options, devices)
    memory = compiled.memory_analysis()
    found = collectives(compiled.as_text())
    chosen = Counter(
        {f"{op}: {how} ({why})": n for (op, how, why), n in dispatch.decisions.items()}
    )
    return {
        "jax": jax.__version__,
        "options": settings(options),
        "slots": options.num_subkeys**2,
        "argument_megabytes": memory.argument_size_in_bytes / 1e6,
        "peak_megabytes": memory.peak_memory_in_bytes / 1e6,
        "temporary_megabytes": memory.temp_size_in_bytes / 1e6,
        "sent_megabytes": {
            axes: {kind: sent / 1e6 for kind, sent in kinds.items()}
            for axes, kinds in sent_by_axes(found, mesh).items()
        },
        "collectives": sum(one.times for one in found),
        "implementations": dict(sorted(chosen.items())),
        "compile_seconds": time.perf_counter() - began,
    }


def main(options: Options) -> None:
    row = measure(options)
    if options.out is None:
        print(json.dumps(row, indent=1))
        return
    rows = json.loads(options.out.read_text()) if options.out.is_file() else []
    rows = [old for old in rows if old["options"] != row["options"]] + [row]
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
