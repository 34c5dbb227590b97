"""Compares memory layers whose sequences lie over simulated devices with the same on one device.

    python -m tests.layers.memories.part_runs OUT.json CASE [CASE ...]

A case is NAME/DEVICES/LAYOUT, as `fwpkm/4/independent`, where `mesh` as DEVICES is a mesh with more
axes; NAME/DEVICES/sent for the bytes that a device sends at two lengths; or NAME/DEVICES/stream for
two pieces of a stream. `head` is a Fast Weight Layer; `fwpkm_each` and others with this end have a
memory for each document. The number of devices is fixed before JAX starts.
"""

import os
import sys

from tests.training import mesh_flags

os.environ.update(mesh_flags.environment(8))

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from benchmarks.compiled.collectives import collectives
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayer, FastWeightLayerConfig
from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.layers.partition import MeshConfig, Partition
from fwpkm_jax.rules import SDM, FwMLP, FwPKM
from fwpkm_jax.testing.properties import cast_floats
from fwpkm_jax.training.sharding import make_partition

BATCH, GROUPS, LENGTH, CHUNK, MODEL, VALUE = 4, 2, 64, 8, 8, 8
VOCAB = 11
FWPKM = FwPKM(num_subkeys=4, key_dim=4, value_dim=VALUE, num_heads=2, top_k=2, lookahead=1)
RULES: dict[str, Any] = {
    "fwpkm": FWPKM,
    "ahead": dataclasses.replace(FWPKM, lookahead=3),
    "clipped": dataclasses.replace(FWPKM, write_clip=0.5),  # Not split: goes from device to device.
    "sdm": SDM(num_subkeys=4, value_dim=VALUE, num_heads=2, num_writes=2, num_reads=3),
    "fwmlp": FwMLP(key_dim=4, value_dim=VALUE, hidden_dim=6),
}
EACH, EACH_CHUNK = "_each", 11


def build(name: str, dtype: Any) -> tuple[Any, Any, Any]:
    rule = RULES[name.removesuffix(EACH)]
    config, groups = FastWeightConfig(rule=rule, chunk_size=CHUNK), GROUPS
    if name == "sdm":  # Each sequence has its own.
        groups = BATCH
    if name.endswith(EACH):  # Chunks end anywhere; one may lie over three of eight devices.
        config = dataclasses.replace(config, documents="document", chunk_size=EACH_CHUNK)
        groups = BATCH
    layer = FastWeight(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))
    memory = layer.init_memory(jax.random.key(1), groups=groups)
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
    mask = rng.uniform(size=(BATCH, LENGTH)) < 0.9
    mask[2, 37:] = mask[3, 48:] = False  # Rows that end within a part and with one.
    mask = jnp.asarray(mask, jnp.float64)
    starts = rng.uniform(size=(BATCH, LENGTH)) < 0.1
    starts[:, [0, 32]] = True
    starts[0, 1:32] = False  # A document over several parts.
    weights = [jnp.asarray(rng.normal(size=x.shape)) * mask[..., None]]
    real = np.asarray(mask) != 0
    weights += [jnp.asarray(rng.normal(size=97)) for _ in range(8)]
    arguments = ((params, x, memory), mask, jnp.asarray(starts), weights)
    partition = partition_of(devices, layout)
    expected = results_of(graphdef, None)(*arguments)
    # A memory of several sequences: devices have their own order of them.
    x, mask, starts, weights[0] = (
        partition.interleave(jnp.asarray(x), GROUPS) for x in (x, mask, starts, weights[0])
    )
    found = results_of(graphdef, partition)((params, x, memory), mask, starts, weights)
    back = np.argsort(np.asarray(partition.interleave(jnp.arange(BATCH), GROUPS)))
    worst: dict[str, float] = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), mine in zip(leaves, jax.tree.leaves(found), strict=True):
        theirs, mine = np.asarray(theirs), np.asarray(mine)
        assert theirs.shape == mine.shape, path
        if theirs.shape[:2] == (BATCH, LENGTH):
            mine, theirs = mine[back][real], theirs[real]
        size = max(float(np.max(np.abs(theirs), initial=0)), 1e-3)
        if theirs.dtype == np.float32:  # Measures of slots: their rounding, as that of float64.
            size *= np.finfo(np.float32).eps / np.finfo(np.float64).eps
        worst[jax.tree_util.keystr(path)] = float(np.max(np.abs(theirs - mine), initial=0)) / size
    assert all(np.isfinite(list(worst.values()))), worst
    return worst


class Heads(NamedTuple):
    """A Fast Weight Layer over whole sequences and over parts of them, and its parameters."""

    whole: Any
    parts: Any
    params: Any


def build_heads(partition: Partition, dtype: Any) -> Heads:
    config = FastWeightLayerConfig(hidden_dim=6, chunk_size=4, segment_length=3, initial_rate=0.1)
    layer = FastWeightLayer(config, MODEL, init_std=0.5, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    axis, rows = partition.sequence, partition.tokens()
    assert axis is not None

    def whole(params, x, readout, tokens, starts):
        return nnx.merge(graphdef, params)(x, tokens, (readout, None), starts=starts).x

    def parts(params, x, readout, tokens, starts):
        def run(params, x, readout, tokens, starts):
            layer = nnx.merge(graphdef, params)
            return layer.of_part(x, tokens, (readout, None), axis=axis, starts=starts)[0].x

        specs = (P(), rows, P(), rows, rows)
        return partition.run(run, in_specs=specs, out_specs=rows)(
            params, x, readout, tokens, starts
        )

    return Heads(whole, parts, cast_floats(params, dtype))


def compare_streams(name: str, devices: str) -> dict[str, float]:
    """`compare` of a stream of two pieces with documents, the second with padding."""
    rng = np.random.default_rng(0)
    graphdef, params, memory = build(name, jnp.float64)
    x = rng.normal(size=(2, BATCH, 16, MODEL))
    mask = rng.uniform(size=(2, BATCH, 16)) < [[[1.0]], [[0.6]]]
    starts = rng.uniform(size=(BATCH, 32)) < 0.1
    numbers = 1 + np.cumsum(starts, axis=1)
    numbers, starts = (x.reshape(BATCH, 2, 16).swapaxes(0, 1) for x in (numbers, starts))
    groups, size = BATCH if name == "sdm" else GROUPS, CHUNK
    if name.endswith(EACH):
        groups, size = BATCH, EACH_CHUNK

    def run(partition: Any) -> Any:
        layer = nnx.merge(graphdef, params)
        waiting = jax.eval_shape(
            lambda: layer.init_pending(BATCH, groups, max_chunk_size=size, dtype=jnp.float64)
        )
        waiting = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), waiting)

        @jax.jit
        def read(now, pending, x, mask, numbers, starts):
            options = {"starts": starts, "initial": memory} if name.endswith(EACH) else {}
            options |= {"mask": mask, "numbers": numbers, "partition": partition}
            return layer.stream(x, now, pending, **options)

        y, one, waiting, _ = read(memory, waiting, x[0], mask[0], numbers[0], starts[0])
        z, other, waiting, info = read(one, waiting, x[1], mask[1], numbers[1], starts[1])
        return y, np.asarray(z) * mask[1][:, :, None], one, other, waiting, info.memory_loss

    expected, found = run(None), run(partition_of(devices, "independent"))
    worst: dict[str, float] = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), mine in zip(leaves, jax.tree.leaves(found), strict=True):
        theirs, mine = np.asarray(theirs), np.asarray(mine)
        size = max(float(np.max(np.abs(theirs))), 1e-3)
        worst[jax.tree_util.keystr(path)] = float(np.max(np.abs(theirs - mine))) / size
    assert all(np.isfinite(list(worst.values()))), worst
    return worst


def compare_heads(devices: str) -> dict[str, float]:
    """`compare` of a Fast Weight Layer, whose documents are cut anywhere."""
    rng = np.random.default_rng(0)
    heads = build_heads(partition_of(devices, "independent"), jnp.float64)
    x, readout = (jnp.asarray(rng.normal(size=size)) for size in ((2, 16, MODEL), (MODEL, VOCAB)))
    tokens = jnp.asarray(rng.integers(VOCAB, size=(2, 16)), jnp.int32)
    starts = jnp.asarray(rng.uniform(size=(2, 16)) < 0.15)

    def results(function):
        def loss(*arguments):
            y = function(*arguments, tokens, starts)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))

    expected, found = (results(f)(heads.params, x, readout) for f in (heads.whole, heads.parts))
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
        *(memory, partition.memory_specs(RULES[name.removesuffix(EACH)], memory)),
    )
    starts = jnp.zeros(x.shape[:2], bool) if name.endswith(EACH) else None

    def output(x: Any, memory: Any) -> Any:
        options = {"starts": starts, "partition": partition}
        return nnx.merge(graphdef, params)(x, memory, **options)[:2]

    def gradient(x: Any, memory: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda x: output(x, memory)[0], x)[1](cotangent)

    layout = x.sharding, jax.tree.map(lambda x: x.sharding, memory)
    return {
        "forward": total_sent(devices, output, layout, x, memory),
        "with_gradient": total_sent(devices, gradient, x.sharding, x, memory, x),
    }


def sent_heads(devices: str, length: int) -> dict[str, float]:
    """`sent` of a Fast Weight Layer with two sequences, without documents."""
    partition = partition_of(devices, "independent")
    heads = build_heads(partition, jnp.float32)
    by_token = partition.sharding(*partition.tokens())
    x = jax.ShapeDtypeStruct((2, length, MODEL), jnp.float32, sharding=by_token)
    tokens = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32, sharding=by_token)
    readout = jnp.ones((MODEL, VOCAB), jnp.float32)

    def output(x: Any, tokens: Any) -> Any:
        return heads.parts(heads.params, x, readout, tokens, None)

    def gradient(x: Any, tokens: Any, cotangent: Any) -> Any:
        return jax.vjp(lambda x: output(x, tokens), x)[1](cotangent)

    return {
        "forward": total_sent(devices, output, by_token, x, tokens),
        "with_gradient": total_sent(devices, gradient, by_token, x, tokens, x),
    }


def total_sent(devices: str, function: Any, layout: Any, *arguments: Any) -> float:
    """Bytes that a device sends in one call of the compiled function."""
    compiled = jax.jit(function, out_shardings=layout).lower(*arguments).compile()
    found = collectives(compiled.as_text() or "")
    return sum(one.times * one.sent_bytes(int(devices)) for one in found)


def result_of(case: str) -> Any:
    name, devices, layout = case.split("/")
    if layout == "sent":
        function = sent_heads if name == "head" else functools.partial(sent, name)
        return {length: function(devices, length) for length in (64, 128)}
    if layout == "stream":
        return compare_streams(name, devices)
    if name == "head":
        return compare_heads(devices)
    return compare(name, devices, layout)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    out, *cases = sys.argv[1:]
    Path(out).write_text(json.dumps({case: result_of(case) for case in cases}))
