"""Sparse Delta Memory as a rule: what a token writes, and what options do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.options.overlay import private_tables
from fwpkm_jax.core.streams.streaming import read_sequences
from fwpkm_jax.rules import SDM, SDMMemory
from fwpkm_jax.rules.matrix.sdm_heads import SDMHeads
from fwpkm_jax.testing.rule_case import sample_signals
from tests.rules.matrix_sampling import cast, sample_tokens
from tests.rules.sampling import to_sequence

RULE = SDM.tiny()


def assert_close(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), actual, expected
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("float64")
def test_a_write_of_full_strength_replaces_what_the_token_reads_where_it_writes():
    """With unit weights and the same scores for writes and reads."""
    rule = dataclasses.replace(RULE, write_norm="unit", num_reads=2, num_heads=1, keys="own")
    scores = np.random.default_rng(0).normal(size=(1, 1, 2, 4))
    query = np.concatenate([scores, scores], axis=-2).reshape(1, 1, -1)
    query = jnp.asarray(np.append(query, [[[0.0, 40.0]]], axis=-1))
    value = jnp.arange(3.0)[None]
    memory = rule.init(jax.random.key(0))
    memory = memory._replace(values=1.0 + jnp.zeros(memory.values.shape, jnp.float64))
    one = jnp.ones((1,), jnp.float64)
    step = rule.step(memory, rule.chunk(query, value, (one, one, one)))
    np.testing.assert_allclose(step.output, value, rtol=0, atol=1e-12)
    touched = np.any(np.asarray(step.memory.values) != 1.0, axis=1)
    assert set(np.flatnonzero(touched)) == set(np.asarray(step.access.slot_ids).ravel())


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_token_writes_under_the_scores_of_the_last_token_that_is_no_padding():
    """As a rule whose tokens write under their own scores and are given those of another."""
    signals = sample_signals(RULE, batch=1, length=9)
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    last, own = np.random.default_rng(1).normal(size=(2, 8)), dataclasses.replace(RULE, keys="own")
    query, before = np.array(signals.query), last
    for at in np.flatnonzero(mask[0]):
        query[0, at, :, :8], before = before, signals.query[0, at, :, :8]
    memory = own.init(jax.random.key(0))
    memory = jax.tree.map(lambda x: x.astype(jnp.float64), memory)

    def run(rule, memory, query):
        given = signals._replace(query=query, mask=mask)
        sequence = to_sequence(rule, given, chunk_size=4, dtype=jnp.float64)
        return rule.run(memory, sequence, chunk_size=4)

    expected = run(own, memory, query)
    found = run(RULE, memory._replace(last=jnp.asarray(last)), np.array(signals.query))
    assert_close(found.memory, SDMMemory(expected.memory.values, before))
    assert_close(found.output[mask > 0], expected.output[mask > 0])


def test_the_map_to_reads_begins_as_that_to_writes():
    rule = dataclasses.replace(RULE, read_start="writes")
    kernel = jax.random.normal(jax.random.key(0), (3, 2, rule.key_dim))
    begun = rule.begin_map(kernel)
    np.testing.assert_array_equal(begun[..., 8:16], kernel[..., :8])
    np.testing.assert_array_equal(begun.at[..., 8:16].set(0), kernel.at[..., 8:16].set(0))


@pytest.mark.slow
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


@pytest.mark.slow
def test_users_who_share_a_base_read_and_write_as_with_tables_of_their_own():
    """Bit for bit, and only slots that a user writes take room; what finds none makes reads NaN."""
    rule = dataclasses.replace(RULE, num_reads=4)  # Reads also of slots that nobody writes.
    sequence = to_sequence(rule, sample_signals(rule, length=6), chunk_size=6, dtype=jnp.float32)
    users = jax.tree.map(lambda x: x[:, None], sequence._replace(cut=None))
    base = jax.random.normal(jax.random.key(1), (1, rule.num_slots, rule.value_dim))
    scores = jnp.zeros((1, 2, 8))
    base = SDMMemory(base, scores)
    private = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), base)

    @jax.jit
    def twice(memory):
        first = rule.run_groups(memory, users, chunk_size=6)
        second = rule.run_groups(first.memory, users, chunk_size=6)
        read, _ = read_sequences(rule.read, second.memory, users.query)
        return second.memory, first.output, second.output, read

    def overlay(capacity):
        return rule.overlay(private, base, capacity=capacity)

    memory, *outputs = twice(private)
    shared, *read = twice(overlay(16))
    jax.tree.map(np.testing.assert_array_equal, read, outputs)
    np.testing.assert_array_equal(private_tables(shared.values), memory.values)
    changed = np.any(np.asarray(memory.values != base.values), axis=-1).sum(axis=1)
    np.testing.assert_array_equal(shared.values.used, changed)
    assert changed.min() < 16
    lost, *_, last = twice(overlay(int(changed.min()) - 1))
    assert np.all(np.asarray(lost.values.lost) > 0)
    assert np.all(np.isnan(last))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_documents_of_heads_begin_with_the_table_they_are_given_gradients_included():
    """In chunks as token by token; the second row begins with a document that goes on."""
    rule, starts = SDMHeads(chunk_size=4), np.zeros((2, 9), bool)
    starts[0, [0, 1, 6]] = starts[1, [3, 4]] = True
    tokens = cast(sample_tokens(rule, batch=2, length=9), jnp.float64)
    (_, _, heads, key), value = tokens.key.shape, tokens.value.shape[-1]
    rng, empty = np.random.default_rng(0), rule.init(2, heads, key, value, dtype=jnp.float64)
    tables = [jnp.asarray(rng.normal(size=x.shape)) for x in (empty, empty[0], tokens.value)]

    def results(form):
        def loss(state, fresh, tokens):
            out = form(tokens, state, jnp.asarray(starts), fresh=fresh)
            return jnp.sum(out.output * tables[2]) + jnp.sum(jnp.sin(out.final_state)), out

        given = *tables[:2], tokens
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*given)

    ours, theirs = results(rule.run), results(rule.recurrent)
    assert_close(ours, theirs)
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(theirs[1][:2]))


def test_a_head_finds_no_more_slots_than_there_are_rows():
    with pytest.raises(ValueError, match="num_reads=9 exceeds num_subkeys=8"):
        SDM(num_subkeys=8, num_writes=2, num_reads=9)
