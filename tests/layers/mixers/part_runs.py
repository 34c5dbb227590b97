"""Compares mixers whose sequences lie over simulated devices with the same on one device.

    python -m tests.layers.mixers.part_runs OUT.json NAME/DEVICES[/KIND] [NAME/DEVICES ...]

KIND is `documents` (rows of several documents that go on from a cache), `padded` (the same with
padding anywhere) or `whole`. The number of devices is fixed before JAX starts. Writes the largest
differences, relative to the largest number, and what each device sends at two lengths.
"""

import os
import sys

from tests.training import mesh_flags

os.environ.update(mesh_flags.environment(8))

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.compiled.collectives import collectives
from fwpkm_jax.layers.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LaCTConfig,
    TitansConfig,
    TitansMixerConfig,
)
from fwpkm_jax.layers.mixers.base import AbstractMixerConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMixerConfig
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.testing.properties import cast_floats
from fwpkm_jax.training.sharding import make_partition
from tests.layers.mixers.own_mixer import RunningSumConfig

BATCH, LENGTH, BEFORE, MODEL = 2, 16, 3, 8
HEADS: dict[str, Any] = {
    "num_key_heads": 2,
    "num_value_heads": 2,
    "key_head_dim": 4,
    "value_head_dim": 3,
}
ATTENTION: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "rotary_fraction": 0.5,
}


LACT: dict[str, Any] = {
    "num_heads": 4,
    "num_fast_heads": 2,
    "hidden_dim": 4,
    "chunk_size": 3,
    "window": 5,
    "low_rank": 2,
    "base_rate": 0.5,
}
TITANS: dict[str, Any] = {"num_heads": 1, "head_dim": 8, "depth": 1, "max_rate": 0.5}


def titans(name: str) -> TitansMixerConfig:
    """A variant, behind persistent tokens if the name ends so; chunks exceed some parts."""
    variant = {"titans": "alone", "titans_mac": "mac", "titans_mag": "mag", "titans_mal": "mal"}
    memory = TitansConfig(
        **TITANS,
        chunk_size=None if name == "titans_mal" else 6,
        write_size=2,
        num_persistent=3 if name.endswith("persistent") else 0,
    )
    attention = AttentionConfig(**ATTENTION, window=5)
    variant = variant[name.removesuffix("_persistent")]
    return TitansMixerConfig(variant=variant, memory=memory, attention=attention)  # pyright: ignore


def config_of(name: str) -> AbstractMixerConfig:
    """A mixer's smallest configuration; its window is longer than a part on eight devices."""
    if name == "attention":
        return AttentionConfig(**ATTENTION)
    if name == "window":
        return AttentionConfig(**ATTENTION, window=5)
    if name == "gdn":
        return GatedDeltaNetConfig(**HEADS, chunk_size=4)
    if name == "lact":
        return LaCTConfig(**LACT)
    if name.startswith("titans"):
        return titans(name)
    if name == "own":
        return RunningSumConfig()
    return MatrixMixerConfig(rule=MATRIX_RULES[name](chunk_size=4), decay_rank=2, **HEADS)


def build(name: str, dtype: Any) -> Any:
    mixer = config_of(name).build(MODEL, norm_eps=1e-5, init_std=0.5, dtype=None, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer)
    return graphdef, cast_floats(params, dtype)


def loss_and_results(graphdef, partition):
    """A function of parameters, tokens and cache: a weighted sum of all results, and these."""

    def loss(arguments, mask, starts, weights):
        params, x, cache = arguments
        mixer = nnx.merge(graphdef, params)
        results = mixer(x, mask=mask, starts=starts, cache=cache, partition=partition)
        pairs = zip(jax.tree.leaves(results), weights, strict=False)
        total = sum(jnp.sum(x * jnp.resize(w, x.shape)) for x, w in pairs if x.dtype.kind == "f")
        return total, results

    return jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))


def compare(name: str, devices: int, kind: str) -> dict[str, float]:
    """The differences between several devices and one, in float64, by result and gradient."""
    rng = np.random.default_rng(0)
    graphdef, params = build(name, jnp.float64)
    x = jnp.asarray(rng.normal(size=(BATCH, BEFORE + LENGTH, MODEL)))
    mask, starts, cache = None, None, None
    if kind != "whole":
        mixer = nnx.merge(graphdef, params)
        empty = mixer.init_cache(BATCH, max_length=LENGTH + BEFORE, dtype=x.dtype)
        cache = jax.jit(lambda x, cache: mixer(x, cache=cache)[1])(x[:, :BEFORE], empty)
        # Ends at the cuts of eight, four and two devices, one token documents, a long document.
        starts = np.zeros((BATCH, LENGTH), bool)
        starts[0, [1, 4, 5, 11]] = True
        starts[1, [0, 7, 8, 9]] = True
        starts = jnp.asarray(starts)
    if kind == "padded":  # At starts, over a part's end, one token of a part, none of another.
        mask = np.ones((BATCH, LENGTH), bool)
        mask[0, [1, 3, 4, 8, 9, 10, 11, 15]] = False
        mask[1, [0, 4, 6, 7, 8, 12, 13, 14, 15]] = False
        mask = jnp.asarray(mask)
    weights = [jnp.asarray(rng.normal(size=97)) for _ in range(8)]
    arguments = ((params, x[:, BEFORE:], cache), mask, starts, weights)
    expected = loss_and_results(graphdef, None)(*arguments)
    partition = make_partition(MeshConfig(sequence=devices), jax.devices()[:devices])
    found = loss_and_results(graphdef, partition)(*arguments)
    worst: dict[str, float] = {}
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, theirs), mine in zip(leaves, jax.tree.leaves(found), strict=True):
        if theirs.dtype == jax.dtypes.float0:
            continue
        theirs, mine = np.asarray(theirs), np.asarray(mine)
        assert theirs.shape == mine.shape, path
        assert theirs.dtype == mine.dtype, path
        size = max(float(np.max(np.abs(theirs), initial=0)), 1e-3)
        worst[jax.tree_util.keystr(path)] = float(np.max(np.abs(theirs - mine), initial=0)) / size
    assert all(np.isfinite(list(worst.values()))), worst
    return worst


def sent(name: str, devices: int, length: int) -> dict[str, float]:
    """Bytes that a device sends in a forward pass, and in a pass with gradients of the tokens."""
    graphdef, params = build(name, jnp.float32)
    partition = make_partition(MeshConfig(sequence=devices), jax.devices()[:devices])
    assert partition is not None
    x = jax.ShapeDtypeStruct(
        (BATCH, length, MODEL), jnp.float32, sharding=partition.sharding(*partition.tokens())
    )

    def output(x):
        return nnx.merge(graphdef, params)(x, partition=partition)[0]

    def gradient(x, cotangent):
        return jax.vjp(output, x)[1](cotangent)

    def total(function, *arguments):
        compiled = jax.jit(function, out_shardings=x.sharding).lower(*arguments).compile()
        found = collectives(compiled.as_text() or "")
        return sum(one.times * one.sent_bytes(devices) for one in found)

    return {"forward": total(output, x), "with_gradient": total(gradient, x, x)}


def result_of(case: str) -> Any:
    name, devices, kind = (*case.split("/"), "documents")[:3]
    if kind == "sent":
        return {length: sent(name, int(devices), length) for length in (32, 64)}
    return compare(name, int(devices), kind)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    out, *cases = sys.argv[1:]
    Path(out).write_text(json.dumps({case: result_of(case) for case in cases}))
