"""Saves a state over one mesh and reads it over another, with eight simulated devices."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.checkpoints.restore import read_checkpoint
from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
from fwpkm_jax.training.sharding import make_partition, state_shardings
from fwpkm_jax.training.state import MemoryConfig, TrainState, init_state, model_graph

MESHES = {
    "1": MeshConfig(),
    "4_data": MeshConfig(data=4),
    "4_columns": MeshConfig(data=2, fsdp=2, memory="columns"),
    "4_slots": MeshConfig(fsdp=2, model=2, memory="slots"),
    "8_fsdp": MeshConfig(data=2, fsdp=4),
    "8_columns": MeshConfig(data=2, fsdp=2, model=2, memory="columns"),
    "8_slots": MeshConfig(data=2, fsdp=2, model=2, memory="slots"),
}
SOME = (("8_columns", "1"), ("1", "8_fsdp"), ("8_columns", "4_data"), ("8_columns", "8_slots"))
ALL = tuple((saved, read) for saved in MESHES for read in MESHES)


def restores(
    model: ModelConfig, directory: Path, pairs: Iterable[tuple[str, str]]
) -> dict[str, dict[str, bool]]:
    """Of each pair of meshes whether all arrays came back, and each as the second mesh asks.

    And the same of half as many memories as were saved.
    """
    optimizer = make_optimizer(OptimizerConfig(), steps=10)

    def init() -> TrainState:
        state = init_state(model, memory=MemoryConfig(groups=8), optimizer=optimizer, seed=0)
        return state._replace(opt_state=jax.tree.map(_numbered, state.opt_state))

    shapes = jax.eval_shape(init)

    def layout_on(mesh: MeshConfig, shapes: TrainState = shapes) -> TrainState | None:
        partition = make_partition(mesh, jax.devices()[: mesh.num_devices])
        if partition is None:
            return None
        graphdef = model_graph(model)
        return state_shardings(partition, shapes, graphdef=graphdef)

    layouts = {name: layout_on(mesh) for name, mesh in MESHES.items()}
    expected = _numpy(jax.jit(init)())
    results = {}
    for saved, read in pairs:
        folder = directory / f"on_{saved}"
        if not folder.exists():
            with Checkpoints(folder, CheckpointConfig()) as checkpoints:
                state = jax.device_put(expected, layouts[saved])
                state = state._replace(rng=jax.random.key(0))
                checkpoints.save(state, data_position=None, config={})
        state = read_checkpoint(folder, 0, shapes, layouts[read]).state
        results[f"{saved} -> {read}"] = {
            "equal": _equal(state, expected),
            "laid_out": layouts[read] is None or _laid_out(state, layouts[read]),
        }
    # Every second of eight memories, over four devices.
    fewer = shapes._replace(memory=jax.tree.map(_half, shapes.memory))
    layout = layout_on(MESHES["4_columns"], fewer)
    state = read_checkpoint(directory / "on_8_columns", 0, fewer, layout, merge="first").state
    halved = expected._replace(memory=jax.tree.map(lambda x: x[::2], expected.memory))
    results["8 memories -> 4"] = {
        "equal": _equal(state, halved),
        "laid_out": _laid_out(state, layout),
    }
    return results


def _half(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // 2, *x.shape[1:]), x.dtype)


def _equal(state: TrainState, expected: TrainState) -> bool:
    leaves = zip(jax.tree.leaves(_numpy(state)), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def _numbered(x: jax.Array) -> jax.Array:
    """Adds each element's index to it, because the optimiser's arrays start as zeros."""
    return x + jnp.arange(x.size).reshape(x.shape).astype(x.dtype)


def _numpy(state: TrainState) -> TrainState:
    return jax.tree.map(np.asarray, state._replace(rng=np.zeros(0)))


def _laid_out(state: TrainState, layout: Any) -> bool:
    arrays, layouts = (jax.tree.leaves(tree[:4]) for tree in (state, layout))
    return all(x.sharding.is_equivalent_to(y, x.ndim) for x, y in zip(arrays, layouts, strict=True))
