"""Sparse Delta Memory as a rule: what a token writes, and what options do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules import SDM
from fwpkm_jax.testing.rule_case import sample_signals
from tests.rules.sampling import to_sequence

RULE = SDM.tiny()


def assert_close(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), actual, expected
    )


@pytest.mark.usefixtures("float64")
def test_a_write_of_full_strength_replaces_what_the_token_reads_where_it_writes():
    """With unit weights and the same scores for writes and reads."""
    rule = dataclasses.replace(RULE, write_norm="unit", num_reads=2, num_heads=1)
    scores = np.random.default_rng(0).normal(size=(1, 1, 2, 4))
    query = np.concatenate([scores, scores], axis=-2).reshape(1, 1, -1)
    query = jnp.asarray(np.append(query, [[[0.0, 40.0]]], axis=-1))
    value = jnp.arange(3.0)[None]
    memory = rule.init(jax.random.key(0))
    memory = memory._replace(values=1.0 + jnp.zeros(memory.values.shape, jnp.float64))
    one = jnp.ones((1,), jnp.float64)
    step = rule.step(memory, rule.chunk(query, value, (one, one, one)))
    weights = step.access.slot_weights
    norm = jnp.sqrt(jnp.sum(weights**2))
    np.testing.assert_allclose(step.output / norm, value, rtol=0, atol=1e-12)
    touched = np.any(np.asarray(step.memory.values) != 1.0, axis=1)
    assert set(np.flatnonzero(touched)) == set(np.asarray(step.access.slot_ids).ravel())


@pytest.mark.thorough("option1")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("option", [{"decay": "none"}, {"decay": "weighted"}, {"temperature": 0.3}])
def test_options_change_what_is_written_in_a_pass_as_in_steps(option):
    rule = dataclasses.replace(RULE, **option)
    signals = sample_signals(rule, batch=1, length=9)
    sequence = to_sequence(rule, signals, chunk_size=4, dtype=jnp.float64)
    memory = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float64), rule.memory_shapes)
    out = rule.run(memory, sequence, chunk_size=4)
    step = rule.step(memory, jax.tree.map(lambda x: x[0], sequence._replace(cut=None)))
    assert_close((out.memory, out.output[0]), (step.memory, step.output))
    plain = RULE.run(memory, sequence, chunk_size=4)
    assert not np.allclose(plain.memory.values, out.memory.values, atol=1e-6)


def test_a_head_finds_no_more_slots_than_there_are_rows():
    with pytest.raises(ValueError, match="num_reads=9 exceeds num_subkeys=8"):
        SDM(num_subkeys=8, num_writes=2, num_reads=9)
