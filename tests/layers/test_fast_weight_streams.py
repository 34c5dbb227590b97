"""The memory block token by token: cuts, padding, queues, flushes, reading alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.memory_block import (
    BATCH,
    CHUNK,
    assert_close,
    assert_equal,
    layer_of,
    params_of,
    sample,
    start,
    whole,
)

pytestmark = pytest.mark.usefixtures("float64")


@functools.partial(jax.jit, static_argnames=("write", "chunk_size"))
def piece(params, x, memory, pending, mask=None, *, write=True, chunk_size=None):
    layer = layer_of(params)
    return layer.stream(x, memory, pending, mask=mask, write=write, chunk_size=chunk_size)


@jax.jit
def jitted_flush(params, memory, pending):
    return layer_of(params).flush(memory, pending)


def flush(memory, pending):
    return jitted_flush(params_of(), memory, pending)[0]


def in_pieces(lengths, x, memory, mask=None, **options):
    groups = jax.tree.leaves(memory)[0].shape[0]
    pending = layer_of(params_of()).init_pending(BATCH, groups, max_chunk_size=4, dtype=jnp.float64)
    x, mask = np.asarray(x), None if mask is None else np.asarray(mask)  # Cut on the host.
    outputs, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        masked = None if mask is None else mask[:, part]
        y, memory, pending, _ = piece(params_of(), x[:, part], memory, pending, masked, **options)
        outputs.append(y)
        first += length
    return np.concatenate(outputs, axis=1), memory, pending


@pytest.mark.slow
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=6),
    groups=st.sampled_from([1, BATCH]),
    seed=st.integers(0, 99),
)
def test_a_stream_in_pieces_equals_the_stream_token_by_token(lengths, groups, seed):
    length = sum(lengths)
    memory, x = start(groups=groups), sample(length, seed=seed)
    mask = jnp.asarray(np.random.default_rng(seed).uniform(size=(BATCH, length)) < 0.8, x.dtype)
    output, after, pending = in_pieces(lengths, x, memory, mask)
    expected, expected_after, expected_pending = in_pieces([1] * length, x, memory, mask)
    real = np.asarray(mask)[..., None]  # Padding reads the memory before or after a write.
    assert_close(output * real, expected * real)
    assert_close(after, expected_after)
    # What waits is the same too, up to what stands behind the waiting tokens.
    assert_close(flush(after, pending), flush(expected_after, expected_pending))
    np.testing.assert_array_equal(pending.num_waiting, expected_pending.num_waiting)


@pytest.mark.slow
def test_padding_takes_no_place_in_the_queue_of_a_memory_of_ones_own():
    """Sequences that own their memories stream as each does alone, wherever padding stands."""
    x = sample(8, seed=3)
    mask = jnp.asarray([[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]], x.dtype)
    for lengths in ([8], [3, 1, 3, 1]):
        output, after, pending = in_pieces(lengths, x, start(groups=BATCH), mask)
        flushed = flush(after, pending)
        for row in range(BATCH):
            real = np.flatnonzero(mask[row])
            both = jnp.repeat(x[row : row + 1, real], BATCH, axis=0)
            ones = np.ones(both.shape[:2])
            alone, after_alone, waiting = in_pieces(
                [1] * len(real), both, start(groups=BATCH), ones
            )
            assert_close(output[row, real], alone[0])
            assert pending.num_waiting[row] == waiting.num_waiting[0] == (len(real) - 1) % CHUNK + 1
            one = lambda tree, row: jax.tree.map(lambda leaf: leaf[row], tree)  # noqa: E731
            assert_close(one(after, row), one(after_alone, 0))
            assert_close(one(flushed, row), one(flush(after_alone, waiting), 0))


def test_a_stream_with_a_larger_chunk_than_its_queue_is_refused():
    with pytest.raises(ValueError, match="chunk_size=5 with lookahead=1 does not fit a queue of 5"):
        in_pieces([1], sample(), start(), chunk_size=5)


@pytest.mark.slow
def test_a_flush_writes_the_waiting_pairs_of_every_group():
    memory, x = start(groups=BATCH), sample(3)
    _, memory_before, pending = in_pieces([3], x, memory, np.ones((BATCH, 3)))
    assert_equal(memory_before, memory)
    flushed, kept = jitted_flush(params_of(), memory_before, pending)
    np.testing.assert_array_equal(kept.num_waiting, [1] * BATCH)
    # The first two tokens have their targets: a chunk of two, followed by its lookahead.
    _, expected, _ = in_pieces([3], x, memory, chunk_size=2)
    assert_close(flushed, expected)
    again, same = jitted_flush(params_of(), flushed, kept)
    assert_equal((again, same), (flushed, kept))


@pytest.mark.slow
@pytest.mark.parametrize("write", [True, False])
def test_padding_in_front_counts_in_no_reported_loss(write):
    """A padded query has no loss, though a real token follows it."""
    x, mask = sample(8), np.array([[0.0] * 5 + [1.0] * 3] * BATCH)
    memory = start(groups=BATCH)
    pending = layer_of(params_of()).init_pending(BATCH, BATCH, max_chunk_size=4, dtype=x.dtype)
    info = piece(params_of(), x, memory, pending, mask, write=write)[-1]
    alone = piece(params_of(), x[:, 5:], memory, pending, mask[:, 5:], write=write)[-1]
    assert_equal(info.token_loss[:, :5], jnp.zeros((BATCH, 5)))
    assert_close(info.token_loss[:, 5:], alone.token_loss)
    assert_close(info.memory_loss, alone.memory_loss)
    assert alone.memory_loss > 0


@pytest.mark.slow
def test_a_frozen_memory_is_read_and_left_alone():
    params, memory, x = params_of(), start(), sample()
    y, after, info = whole(params, x, memory, write=False)
    assert_equal(after, memory)
    assert info.write is None
    streamed, memory_after, pending = in_pieces([1, 3, 1, 3], x, memory, write=False)
    assert_close(streamed, y)
    assert_equal(memory_after, memory)
    assert pending.num_waiting == 0
    written = whole(params, x, memory)[0]
    assert_close(written[:, :CHUNK], y[:, :CHUNK])
    assert np.all(np.any(written[:, CHUNK:] != y[:, CHUNK:], axis=-1))
