"""FwPKM, by chunks, by sequences and by groups, equals its definition, gradients included."""

import dataclasses
import functools
import inspect
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.chunks import map_groups
from fwpkm_jax.core.slots.definition import read_and_write
from fwpkm_jax.rules import FwPKM
from tests.rules.sampling import init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
RULE = FwPKM(num_subkeys=7, key_dim=6, value_dim=4, num_heads=2, top_k=3)
CHUNK, BATCH, LENGTH = 4, 2, 12
OPTIONS = [
    {},
    {"score": "dot", "num_heads": 1},
    {"learning_rate": 0.3, "value_step": 2.5, "addressing_weight": 3.0, "top_k": 2},
]


def defined(rule):
    """One chunk as the definition has it, for the options that the page has."""
    names = ("top_k", "score", "learning_rate", "value_step", "addressing_weight")
    return functools.partial(read_and_write, **{name: getattr(rule, name) for name in names})


def step(rule, memory, sequence, written_out):
    chunk = jax.tree.map(lambda x: x[:, :CHUNK].reshape(-1, *x.shape[2:]), sequence)
    if written_out:
        return defined(rule)(memory.keys, memory.values, chunk)
    out = rule.step(memory, chunk)
    return out.memory.keys, out.memory.values, out.output


def run(rule, memory, sequence, written_out):
    if not written_out:
        out = rule.run(memory, sequence, chunk_size=CHUNK)
        return out.memory.keys, out.memory.values, out.output
    keys, values = memory.keys, memory.values
    reads = []
    for start in range(0, LENGTH, CHUNK):
        part = jax.tree.map(lambda x, i=start: x[:, i : i + CHUNK], sequence)
        keys, values, read = step(rule, memory._replace(keys=keys, values=values), part, True)
        reads.append(read.reshape(BATCH, CHUNK, -1))
    return keys, values, jnp.concatenate(reads, axis=1)


def run_groups(rule, memory, sequence, written_out):
    memory, sequence = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), (memory, sequence))
    if written_out:
        return map_groups(lambda m, s: run(rule, m, s, True), memory, sequence)
    out = rule.run_groups(memory, sequence, chunk_size=CHUNK)
    return out.memory.keys, out.memory.values, out.output


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def results_and_cotangents(way, rule, memory, sequence, written_out):
    """Keys, values, reads; and the cotangents of memory and sequence from ones of all of these."""
    results, back = jax.vjp(lambda m, s: way(rule, m, s, written_out), memory, sequence)
    return results, back(
        jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), results)
    )


@pytest.mark.slow_cases("run-{'score': 'dot', 'num_heads': 1}")
@pytest.mark.by_default(
    "step-{'score': 'dot', 'num_heads': 1}", thorough=["run-{'score': 'dot', 'num_heads': 1}"]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("way", [step, run, run_groups], ids=lambda way: way.__name__)
def test_the_rule_equals_its_definition(way, options):
    rule = dataclasses.replace(RULE, **options)
    signals = sample_signals(rule, batch=BATCH, length=LENGTH, masked=True)
    sequence = to_sequence(rule, signals, chunk_size=CHUNK, dtype=jnp.float64)
    memory = init_memory(rule, jnp.float64)
    actual, expected = (
        results_and_cotangents(way, rule, memory, sequence, written) for written in (False, True)
    )
    chex.assert_trees_all_equal_structs(actual, expected)
    for (path, x), (_, y) in zip(
        *(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (actual, expected)), strict=True
    ):
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-300)
        assert error < 1e-12, f"{jax.tree_util.keystr(path)} differs by {error:.1e} of its norm"
    keys, values, _ = expected[0]
    assert np.any(np.asarray(keys) != np.asarray(memory.keys))
    assert np.any(np.asarray(values) != np.asarray(memory.values))


def test_the_readmes_lines_are_the_definitions():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    block = readme.partition("## What FwPKM computes")[2].split("```")[1]
    page = [
        line.partition("  #")[0].strip() for line in inspect.getsource(read_and_write).split("\n")
    ]
    lines = [line for line in block.splitlines()[1:] if line != "..."]
    assert len(lines) == 9
    assert [line for line in page if line in lines] == lines
