"""The stream's queue against a token-by-token account of its rule, with a plain matrix memory."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.core.chunks import Chunk
from fwpkm_jax.core.slots.options.blocks import write_whole
from fwpkm_jax.core.streams.flush import flush
from fwpkm_jax.core.streams.pending import Pending, Signals, init_pending
from fwpkm_jax.core.streams.queue import clear
from fwpkm_jax.core.streams.streaming import push
from fwpkm_jax.core.targets import shift_left

pytestmark = pytest.mark.usefixtures("float64")
BATCH, KEY, VALUE, CAPACITY = 2, 3, 2, 7
# Few lengths and chunk sizes, so that each pair compiles once for all examples.
LENGTHS, CHUNK_SIZES = (1, 2, 6), (2, 5)
LOOKAHEADS = (0, 1, 2)


def read(memory, query):
    return jnp.einsum("tk,kv->tv", query[:, 0], memory), {"first": query[:, 0, 0]}


def write(memory, chunk):
    """Every field of the chunk leaves its own trace."""
    traces = jnp.einsum("tk,tv,t->kv", chunk.query[:, 0], chunk.target, chunk.write_weight)
    counts = 1.01 * jnp.sum(chunk.counted) + 0.1 * jnp.sum(chunk.paired)
    return 0.5 * memory + traces + 0.001 * counts


class ByHand:
    """The stream's rule on NumPy arrays, one token at a time."""

    def __init__(self, memory, lookahead):
        self.memory, self.lookahead, self.waiting = memory, lookahead, []

    def push(self, signals, chunk_size):
        while len(self.waiting) >= chunk_size + self.lookahead:
            self.write(chunk_size)
        outputs = []
        for time in range(signals.gate.shape[1]):
            token = Signals(*(x[:, time] for x in signals))
            outputs.append(token.query[:, 0] @ self.memory)
            self.waiting.append(token)
            if len(self.waiting) == chunk_size + self.lookahead:
                self.write(chunk_size)
        return np.stack(outputs, axis=1)

    def flush(self):
        if len(self.waiting) > self.lookahead:
            self.write(len(self.waiting) - self.lookahead)

    def write(self, size):
        traces, counts = np.zeros_like(self.memory), 0.0
        for index in range(size):
            token, later = self.waiting[index], self.waiting[index + self.lookahead]
            for b in range(BATCH):
                weight = token.gate[b] * token.mask[b] * later.mask[b]
                traces += weight * np.outer(token.query[b, 0], later.value[b])
                counts += 1.01 * token.mask[b] + 0.1
        self.memory = 0.5 * self.memory + traces + 0.001 * counts
        self.waiting = self.waiting[size:]


def rule_of(lookahead):
    """As much of a rule as a stream uses."""
    return types.SimpleNamespace(
        read=read,
        write=write,
        write_blocks=functools.partial(write_whole, write),
        targets=lambda value: shift_left(value, lookahead),
        chunk=lambda query, target, weights: Chunk(query, target, *weights),
        lookahead=lookahead,
        reads_own_writes=False,
    )


def sample(length, seed=0):
    rng = np.random.default_rng(seed)
    return Signals(
        query=rng.normal(size=(BATCH, length, 1, KEY)),
        value=rng.normal(size=(BATCH, length, VALUE)),
        gate=rng.uniform(size=(BATCH, length)),
        mask=(rng.uniform(size=(BATCH, length)) < 0.8).astype(np.float64),
    )


def piece_of(signals, start, length):
    return Signals(*(x[:, start : start + length] for x in signals))


def start(lookahead, capacity=CAPACITY):
    memory = np.random.default_rng(1).normal(size=(KEY, VALUE))
    one = jax.tree.map(lambda x: jnp.asarray(x)[None], sample(1))
    pending = Pending(*jax.tree.map(lambda x: x[0], init_pending(one, capacity)))
    return jnp.asarray(memory), pending, ByHand(memory, lookahead)


@functools.partial(jax.jit, static_argnames=("chunk_size", "lookahead"))
def jitted_push(memory, pending, signals, *, lookahead, num_real=None, **options):
    """Of one group, whose axis is added and taken off."""
    args = jax.tree.map(lambda x: x[None], (memory, pending, signals))
    num_real = None if num_real is None else num_real[None]
    out = push(rule_of(lookahead), *args, num_real=num_real, **options)
    return jax.tree.map(lambda x: x[0], tuple(out))


@functools.partial(jax.jit, static_argnames="lookahead")
def jitted_flush(memory, pending, *, lookahead):
    args = jax.tree.map(lambda x: x[None], (memory, pending))
    # Blocks of 2 tokens, so that a flush takes several and the last one overlaps the one before.
    out = flush(rule_of(lookahead), *args, block=2)
    return jax.tree.map(lambda x: x[0], out)


def hold(memory, pending, signals, **options):
    """Reads and queues alone."""
    piece = jax.tree.map(jnp.asarray, signals)
    same, *out = jitted_push(memory, pending, piece, chunk_size="flush", lookahead=0, **options)
    np.testing.assert_array_equal(same, memory)
    return out


@pytest.mark.slow_cases("1")
@pytest.mark.by_default("0", thorough=["1"])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@settings(max_examples=15)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(LENGTHS), st.sampled_from(CHUNK_SIZES), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
def test_any_cut_chunk_size_and_flush_follows_the_rule(lookahead, calls, seed):
    signals = sample(sum(length for length, _, _ in calls), seed)
    memory, pending, by_hand = start(lookahead)
    position = 0
    for length, chunk_size, flushed in calls:
        piece = piece_of(signals, position, length)
        position += length
        options = {"chunk_size": chunk_size, "lookahead": lookahead}
        memory, pending, output, access = jitted_push(
            memory, pending, jax.tree.map(jnp.asarray, piece), **options
        )
        np.testing.assert_allclose(output, by_hand.push(piece, chunk_size), rtol=1e-11, atol=1e-12)
        np.testing.assert_array_equal(access["first"], piece.query[:, :, 0, 0])
        if flushed:
            memory, pending = jitted_flush(memory, pending, lookahead=lookahead)
            by_hand.flush()
        np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11, atol=1e-12)
        assert pending.num_waiting == len(by_hand.waiting)
        for index, token in enumerate(by_hand.waiting):
            waiting = Signals(*(x[:, index] for x in pending.tokens))
            jax.tree.map(np.testing.assert_array_equal, waiting, token)


@pytest.mark.by_default("1", "3", "4", "6")
@pytest.mark.parametrize("num_real", [0, 1, 3, 4, 6])
def test_what_stands_behind_the_real_tokens_is_as_if_never_pushed(num_real):
    memory, pending, by_hand = start(1)
    options = {"chunk_size": 2, "lookahead": 1}
    before, piece, behind = sample(2, seed=4), sample(6), sample(2, seed=5)
    memory, pending, _, _ = jitted_push(
        memory, pending, jax.tree.map(jnp.asarray, before), **options
    )
    memory, pending, output, _ = jitted_push(
        memory,
        pending,
        jax.tree.map(jnp.asarray, piece),
        num_real=jnp.asarray(num_real, jnp.int32),
        **options,
    )
    by_hand.push(before, 2)
    if num_real:
        expected = by_hand.push(piece_of(piece, 0, num_real), 2)
        np.testing.assert_allclose(output[:, :num_real], expected, rtol=1e-11)
    assert pending.num_waiting == len(by_hand.waiting)
    memory, _, output, _ = jitted_push(
        memory, pending, jax.tree.map(jnp.asarray, behind), **options
    )
    np.testing.assert_allclose(output, by_hand.push(behind, 2), rtol=1e-11)
    np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11)


@pytest.mark.by_default("0")
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_flush_writes_all_but_the_lookahead_once(lookahead):
    memory, pending, by_hand = start(lookahead)
    same, empty = jitted_flush(memory, pending, lookahead=lookahead)
    np.testing.assert_array_equal(same, memory)
    assert empty.num_waiting == 0
    if lookahead:
        signals = sample(lookahead)
        memory, pending, _, _ = jitted_push(
            memory, pending, jax.tree.map(jnp.asarray, signals), chunk_size=5, lookahead=lookahead
        )
        by_hand.push(signals, 5)
        same, kept = jitted_flush(memory, pending, lookahead=lookahead)
        np.testing.assert_array_equal(same, memory)
        assert kept.num_waiting == lookahead
    signals = sample(3, seed=2)
    memory, pending, _, _ = jitted_push(
        memory, pending, jax.tree.map(jnp.asarray, signals), chunk_size=5, lookahead=lookahead
    )
    by_hand.push(signals, 5)
    before = memory
    memory, pending = jitted_flush(memory, pending, lookahead=lookahead)
    by_hand.flush()
    np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11)
    assert np.any(np.asarray(memory) != np.asarray(before))
    assert pending.num_waiting == lookahead
    again, kept = jitted_flush(memory, pending, lookahead=lookahead)
    np.testing.assert_array_equal(again, memory)
    jax.tree.map(np.testing.assert_array_equal, kept, pending)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_tokens_held_back_are_read_at_once_and_written_as_one_chunk(lookahead):
    memory, pending, by_hand = start(lookahead)
    for length in (1, 2, 2, 2):  # As many as there is room for.
        signals = sample(length, seed=length)
        pending, output, _ = hold(memory, pending, signals)
        expected = by_hand.push(signals, chunk_size=CAPACITY)
        np.testing.assert_allclose(output, expected, rtol=1e-11, atol=1e-12)
    memory, pending = jitted_flush(memory, pending, lookahead=lookahead)
    by_hand.flush()
    np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11)
    assert pending.num_waiting == lookahead


def test_padding_behind_held_tokens_is_overwritten_by_the_next():
    memory, pending, by_hand = start(1)
    for num_real in (1, 2):
        signals = sample(3, seed=num_real)
        pending, _, _ = hold(memory, pending, signals, num_real=jnp.int32(num_real))
        by_hand.push(piece_of(signals, 0, num_real), chunk_size=CAPACITY)
    memory, _ = jitted_flush(memory, pending, lookahead=1)
    by_hand.flush()
    np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11)


@pytest.mark.parametrize(("capacity", "reals"), [(4, (3, 1)), (7, (3, 3)), (9, (1, 5, 2, 1))])
def test_padding_beyond_the_queue_moves_no_held_token(capacity, reals):
    memory, pending, by_hand = start(1, capacity)
    for index, num_real in enumerate(reals):
        signals = sample(5, seed=index)
        pending, _, _ = hold(memory, pending, signals, num_real=jnp.int32(num_real))
        by_hand.push(piece_of(signals, 0, num_real), chunk_size=99)
    assert pending.num_waiting == len(by_hand.waiting)
    for index, token in enumerate(by_hand.waiting):
        waiting = Signals(*(x[:, index] for x in pending.tokens))
        jax.tree.map(np.testing.assert_array_equal, waiting, token)


def test_a_cleared_queue_writes_as_if_nothing_had_waited():
    memory, pending, by_hand = start(1)
    options = {"chunk_size": 2, "lookahead": 1}
    dropped = jax.tree.map(jnp.asarray, sample(2, seed=3))
    memory, pending, _, _ = jitted_push(memory, pending, dropped, **options)
    signals = sample(6)
    memory, pending, output, _ = jitted_push(
        memory, clear(pending), jax.tree.map(jnp.asarray, signals), **options
    )
    np.testing.assert_allclose(output, by_hand.push(signals, 2), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(memory, by_hand.memory, rtol=1e-11)


@pytest.mark.parametrize("chunk_size", [0, 6])
def test_a_chunk_that_cannot_fit_is_refused_with_what_would(chunk_size):
    memory, pending, _ = start(2)
    signals = jax.tree.map(jnp.asarray, sample(1))
    message = f"chunk_size={chunk_size} with lookahead=2 .* queue of 7 tokens; choose 1 to 5"
    with pytest.raises(ValueError, match=message):
        jitted_push(memory, pending, signals, chunk_size=chunk_size, lookahead=2)
