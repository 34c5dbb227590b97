"""Compares memory layers whose sequences lie over simulated devices with the same on one device.

    python -m tests.layers.memories.part_runs OUT.json CASE [CASE ...]

A case is NAME/DEVICES/LAYOUT, as `fwpkm/4/independent`, where `mesh` as DEVICES is a mesh with more
axes; or NAME/DEVICES/sent for the bytes that a device sends at two lengths. `head` is a Fast Weight
Layer. The number of devices is fixed before JAX starts.
"""

import os
import sys

from tests.training import mesh_flags

os.environ.update(mesh_flags.environment(8))

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from fwpkm_jax.analysis.collectives import collectives
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.partition import MeshConfig, Partition
from fwpkm_jax.rules import FwMLP, FwPKM
from fwpkm_jax.testing.properties import cast_floats
from fwpkm_jax.training.sharding import make_partition

BATCH, GROUPS, LENGTH, CHUNK, MODEL, VALUE = 4, 2, 64, 8, 8, 8
FWPKM = FwPKM(num_subkeys=4, key_dim=4, value_dim=VALUE, num_heads=2, top_k=2, lookahead=1)
RULES: dict[str, Any] = {
    "fwpkm": FWPKM,
    "ahead": dataclasses.replace(FWPKM, lookahead=3),
    "clipped": dataclasses.replace(FWPKM, write_clip=0.5),  # Not split: goes from device to device.
    "fwmlp": FwMLP(key_dim=4, value_dim=VALUE, hidden_dim=6),
}


def build(name: str, dtype: Any) -> tuple[Any, Any, Any]:
    config = FastWeightConfig(rule=RULES[name], chunk_size=CHUNK)
    layer = FastWeight(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))
    memory = layer.init_memory(jax.random.key(1), groups=GROUPS)
    graphdef, params = nnx.split(layer)
    return graphdef, cast_floats(params, dtype), cast_floats(memory, dtype)


def partition_of(devices: str, layout: Any) -> Partition:
    if devices == "mesh":
        config = MeshConfig(fsdp=2, model=2, sequence=2, memory=layout)
    else:
        config = MeshConfig(sequence=int(devices), memory=layout)
    partition = make_partition(config, jax.devices()[: config.num_devices])
    assert partition is not None
    return partition


def results_of(graphdef: Any, partition: Any) -> Any:
    """A function of parameters, tokens and memory: a weighted sum, all results, gradients."""

    def loss(arguments: Any, mask: Any, starts: Any, weights: Any) -> Any:
        params, x, memory = arguments
        layer = nnx.merge(graphdef, params)
        y, memory, info = layer(x, memory, mask=mask, starts=starts, partition=partition)
        pairs = zip(jax.tree.leaves(memory), weights[1:], strict=False)
        total = sum(jnp.sum(x * jnp.resize(w, x.shape)) for x, w in pairs)
        return total + jnp.sum(y * weights[0]), (y, memory, info)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def compare(name: str, devices: str, layout: str) -> dict[str, float]:
    """The largest differences relative to the largest number, in float64."""
    rng = np.random.default_rng(0)
    graphdef, params, memory = build(name, jnp.float64)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, MODEL)))
    mask = jnp.asarray(rng.uniform(size=(BATCH, LENGTH)) < 0.9, jnp.float64)
    starts = rng.uniform(size=(BATCH, LENGTH)) < 0.1
    starts[:, [0, 32]] = True
    weights = [jnp.asarray(rng.normal(size=x.shape))]
    weights += [jnp.asarray(rng.normal(size=97)) for _ in range(8)]
    arguments = ((params, x, memory), mask, jnp.asarray(starts), weights)
    partition = partition_of(devices, layout)
    expected = results_of(graphdef, None)(*arguments)
    # A memory of several sequences: devices have their own order of them.
    x, mask, starts, weights[0] = (
        partition.deal(jnp.asarray(x), GROUPS) for x in (x, mask, starts, weights[0])
    )
    found = results_of(graphdef, partition)((params, x, memory), mask, starts, weights)
    back = np.argsort(np.asarray(partition.deal(jnp.arange(BATCH), GROUPS)))
    worst: dict[str, float] = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), mine in zip(leaves, jax.tree.leaves(found), strict=True):
        theirs, mine = np.asarray(theirs), np.asarray(mine)
        assert theirs.shape == mine.shape, path
        if theirs.shape[:2] == (BATCH, LENGTH):
            mine = mine[back]
        size = max(float(np.max(np.abs(theirs), initial=0)), 1e-3)
        worst[jax.tree_util.keystr(path)] = float(np.max(np.abs(theirs - mine), initial=0)) / size
    assert all(np.isfinite(list(worst.values()))), worst
    return worst


def compare_heads(devices: str) -> dict[str, float]:
    """`compare` of a Fast Weight Layer, whose documents are cut anywhere."""
    rng = np.random.default_rng(0)
    config = FastWeightLayerConfig(hidden_dim=6, chunk_size=4, segment_length=3, initial_rate=0.1)
    layer = FastWeightLayer(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    params = cast_floats(params, jnp.float64)
    x, readout = (jnp.asarray(rng.normal(size=size)) for size in ((2, 16, MODEL), (MODEL, 11)))
    tokens = jnp.asarray(rng.integers(11, size=(2, 16)), jnp.int32)
    starts = jnp.asarray(rng.uniform(size=(2, 16)) < 0.15)
    partition = partition_of(devices, "independent")
    axis, rows = partition.sequence, partition.tokens()
    assert axis is not None

    def whole(params, x, readout):
        return nnx.merge(graphdef, params)(x, tokens, (readout, None), starts=starts).x

    def parts(params, x, readout):
        def run(params, x, readout, tokens, starts):
            layer = nnx.merge(graphdef, params)
            return layer.of_part(x, tokens, (readout, None), axis=axis, starts=starts).x

        specs = (P(), rows, P(), rows, rows)
        return partition.run(run, in_specs=specs, out_specs=rows)(
            params, x, readout, tokens, starts
        )

    def results(function):
        def loss(*arguments):
            y = function(*arguments)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    expected, found = (results(f)(params, x, readout) for f in (whole, parts))
    worst: dict[str, float] = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), mine in zip(leaves, jax.tree.leaves(found), strict=True):
        size = max(float(np.max(np.abs(theirs))), 1e-3)
        worst[jax.tree_util.keystr(path)] = float(np.max(np.abs(theirs - mine))) / size
    assert all(np.isfinite(list(worst.values()))), worst
    return worst


def sent(name: str, devices: str, length: int) -> dict[str, float]:
    """Bytes that a device sends in a forward pass, and in a pass with gradients of the tokens."""
    graphdef, params, memory = build(name, jnp.float32)
    partition = partition_of(devices, "independent")
    x = jax.ShapeDtypeStruct(
        (BATCH, length, MODEL), jnp.float32, sharding=partition.sharding(*partition.tokens())
    )
    memory = jax.tree.map(
        lambda x, spec: jax.device_put(x, partition.sharding(*spec)),
        *(memory, partition.memory_specs(RULES[name], memory)),
    )

    def output(x: Any, memory: Any) -> Any:
        return nnx.merge(graphdef, params)(x, memory, partition=partition)[:2]

    def gradient(x: Any, memory: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda x: output(x, memory)[0], x)[1](cotangent)

    def total(function: Any, layout: Any, *arguments: Any) -> float:
        compiled = jax.jit(function, out_shardings=layout).lower(*arguments).compile()
        found = collectives(compiled.as_text() or "")
        return sum(one.times * one.sent_bytes(int(devices)) for one in found)

    layout = x.sharding, jax.tree.map(lambda x: x.sharding, memory)
    return {
        "forward": total(output, layout, x, memory),
        "with_gradient": total(gradient, x.sharding, x, memory, x),
    }


def result_of(case: str) -> Any:
    name, devices, layout = case.split("/")
    if layout == "sent":
        return {length: sent(name, devices, length) for length in (64, 128)}
    if name == "head":
        return compare_heads(devices)
    return compare(name, devices, layout)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    out, *cases = sys.argv[1:]
    Path(out).write_text(json.dumps({case: result_of(case) for case in cases}))
