"""Rules that can be streamed: any cut of a stream leaves what the stream at once leaves."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.streams import holding, streaming
from fwpkm_jax.core.streams.streaming import Signals
from fwpkm_jax.core.targets import WriteWeights
from fwpkm_jax.rules import AbstractChunkRule
from fwpkm_jax.rules.registry import RulesOf
from tests.rules.sampling import INSTANCES, init_memory, sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")
CHUNK_RULES = dict(RulesOf(AbstractChunkRule))
CHUNK_INSTANCES = {
    name: rule for name, rule in INSTANCES.items() if isinstance(rule, AbstractChunkRule)
}
# Lengths and chunk sizes of calls: a token, one chunk, more than two. They are few, so that each
# compiles once for all examples.
CALLS = ((1, 2), (1, 3), (2, 2), (7, 3))
CAPACITY, BATCH = 6, 2


@pytest.fixture(params=CHUNK_INSTANCES.values(), ids=CHUNK_INSTANCES)
def rule(request):
    return request.param


@functools.partial(jax.jit, static_argnums=0)
def read(rule, memory, query):
    return rule.read(memory, query)


@functools.partial(jax.jit, static_argnums=0)
def write(rule, memory, chunk):
    return rule.write(memory, chunk)


@functools.partial(jax.jit, static_argnums=0, static_argnames="chunk_size")
def push(rule, memory, pending, signals, *, chunk_size):
    return streaming.push(
        rule.read,
        rule.write,
        memory,
        pending,
        signals,
        chunk_size=chunk_size,
        lookahead=rule.lookahead,
        make_chunk=rule.chunk,
    )


@functools.partial(jax.jit, static_argnums=0)
def flush(rule, memory, pending):
    options = {"lookahead": rule.lookahead, "make_chunk": rule.chunk, "block": 4}
    return holding.flush(rule.write_blocks, memory, pending, **options)


def start(rule, capacity=CAPACITY):
    one = jax.tree.map(jnp.asarray, sample_signals(rule, batch=BATCH, length=1))
    return init_memory(rule, jnp.float64), streaming.init_pending(one, capacity)


def part(signals, first, last):
    return Signals(*(jnp.asarray(x[:, first:last]) for x in signals))


def complete_chunk(rule, signals, first, last):
    """The tokens of a stream from `first` to `last` as one chunk, each with its target."""
    lookahead = rule.lookahead
    query, _, gate, mask = part(signals, first, last)
    later = part(signals, first + lookahead, last + lookahead)
    weights = WriteWeights(gate * mask * later.mask, jnp.ones_like(gate), mask)
    fields = (query, later.value, weights)
    return rule.chunk(*jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), fields))


def at_once(rule, signals, calls):
    """Outputs and memory of a stream, read token by token and written by its definition."""
    memory, outputs, first, seen = init_memory(rule, jnp.float64), [], 0, 0
    for length, chunk_size in calls:
        # A chunk that is complete already, under a smaller chunk size, is written first.
        for token in [None, *range(length)]:
            if token is not None:
                outputs.append(read(rule, memory, part(signals, seen, seen + 1).query[:, 0])[0])
                seen += 1
            while seen - first >= chunk_size + rule.lookahead:
                chunk = complete_chunk(rule, signals, first, first + chunk_size)
                memory = write(rule, memory, chunk)
                first += chunk_size
    return np.stack(outputs, axis=1), memory, seen - first


@pytest.mark.parametrize("lookahead", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@settings(max_examples=8)
@given(
    calls=st.lists(st.sampled_from(CALLS), min_size=2, max_size=6),
    seed=st.integers(0, 99),
    masked=st.booleans(),
)
@pytest.mark.parametrize("name", CHUNK_RULES)
def test_a_stream_cut_anywhere_follows_its_definition(name, lookahead, calls, seed, masked):
    """The chunk size may change from call to call."""
    rule = dataclasses.replace(CHUNK_RULES[name].tiny(), lookahead=lookahead)
    length = sum(length for length, _ in calls)
    signals = sample_signals(rule, batch=BATCH, length=length, seed=seed, masked=masked)
    expected, expected_memory, waiting = at_once(rule, signals, calls)
    memory, pending = start(rule)
    outputs, first = [], 0
    for length, chunk_size in calls:
        piece = part(signals, first, first + length)
        memory, pending, output, _ = push(rule, memory, pending, piece, chunk_size=chunk_size)
        outputs.append(output)
        first += length
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), expected, rtol=1e-8, atol=1e-10)
    chex.assert_trees_all_close(memory, expected_memory, rtol=1e-8, atol=1e-10)
    assert pending.num_waiting == waiting


def test_without_lookahead_a_stream_equals_the_pass_over_the_sequence(rule):
    rule = dataclasses.replace(rule, lookahead=0)
    signals = sample_signals(rule, batch=BATCH, length=6, masked=True)
    sequence = to_sequence(rule, signals, chunk_size=3, dtype=jnp.float64)
    whole = jax.jit(lambda m, s: rule.run(m, s, chunk_size=3))(
        init_memory(rule, jnp.float64), sequence
    )
    memory, pending = start(rule)
    piece = part(signals, 0, 6)
    memory, _, output, access = push(rule, memory, pending, piece, chunk_size=3)
    chex.assert_trees_all_close(memory, whole.memory, rtol=1e-9, atol=1e-11)
    chex.assert_trees_all_close(
        (output, access), (whole.output, whole.access), rtol=1e-9, atol=1e-11
    )


def test_a_flush_writes_the_complete_pairs_once(rule):
    rule = dataclasses.replace(rule, lookahead=1)
    signals = sample_signals(rule, batch=BATCH, length=4, masked=True)
    memory, pending = start(rule)
    for first in range(4):  # The first waits without a target.
        piece = part(signals, first, first + 1)
        memory, pending, _, _ = push(rule, memory, pending, piece, chunk_size=5)
        if first == 0:
            same, kept = flush(rule, memory, pending)
            chex.assert_trees_all_equal((same, kept), (memory, pending))
    chex.assert_trees_all_equal(memory, start(rule)[0])
    flushed, kept = flush(rule, memory, pending)
    expected = write(rule, memory, complete_chunk(rule, signals, 0, 3))
    chex.assert_trees_all_close(flushed, expected, rtol=1e-9, atol=1e-11)
    assert kept.num_waiting == 1
    chex.assert_trees_all_equal(flush(rule, flushed, kept), (flushed, kept))


def test_a_read_is_that_of_a_step_and_a_write_its_memory(rule):
    signals = sample_signals(rule, batch=BATCH, length=3)
    chunk = to_sequence(rule, signals, chunk_size=3, dtype=jnp.float64)
    chunk = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunk)
    memory = init_memory(rule, jnp.float64)
    step = jax.jit(rule.step)(memory, chunk)
    chex.assert_trees_all_close(
        read(rule, memory, chunk.query), (step.output, step.access), rtol=1e-11
    )
    chex.assert_trees_all_close(write(rule, memory, chunk), step.memory, rtol=1e-11)
