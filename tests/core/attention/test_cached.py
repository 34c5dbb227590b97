"""Attention to a cache in place, against masked attention to all tokens at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.attention.cached import RingCache, larger_ring, put_in_ring, ring_attention
from fwpkm_jax.core.attention.softmax import masked_attention

BATCH, LENGTH, CAPACITY, HEADS, KV_HEADS, HEAD = 2, 13, 5, 4, 2, 3


def sample(length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(length, HEADS), (length, KV_HEADS), (length, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=(BATCH, *shape, HEAD)), jnp.float32) for shape in shapes]


def empty(capacity=CAPACITY):
    zeros = jnp.zeros((BATCH, capacity, KV_HEADS, HEAD))
    none = jnp.full((BATCH, capacity), -1, jnp.int32)
    return RingCache(zeros, zeros, none, jnp.zeros((BATCH,), jnp.int32))


@jax.jit
def call(cache, query, key, value, positions):
    # Six scores per query's head at a time: blocks of one to three keys.
    options = {"positions": positions, "max_scores": BATCH * HEADS * 6}
    output = ring_attention(query, key, value, cache, **options)
    return output, put_in_ring(cache, key, value, positions=positions, after=output)


@pytest.mark.thorough
@pytest.mark.parametrize("lengths", [[2, 3, 2, 6], [6, 6, 1]])
def test_any_cut_sees_the_latest_tokens(lengths):
    query, key, value = sample()
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    expected = masked_attention(
        query, key, value, query_positions=positions, key_positions=positions, window=CAPACITY
    )
    cache, start = empty(), 0
    for length in lengths:
        part = slice(start, start + length)
        output, cache = call(
            cache, query[:, part], key[:, part], value[:, part], positions[:, part]
        )
        np.testing.assert_allclose(output, expected[:, part], rtol=1e-5, atol=1e-6)
        start += length
    assert sorted(cache.positions[0].tolist()) == [8, 9, 10, 11, 12]
    np.testing.assert_array_equal(cache.keys[:, 12 % CAPACITY], key[:, 12])
    assert cache.next_position.tolist() == [13, 13]


@pytest.mark.thorough
def test_a_cache_that_grows_keeps_its_tokens_and_has_room_for_more():
    query, key, value = sample()
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    expected = masked_attention(
        query, key, value, query_positions=positions, key_positions=positions, window=LENGTH
    )
    cache = empty()
    for part in (slice(0, 4), slice(4, LENGTH)):
        cache = larger_ring(cache, LENGTH) if part.start else cache
        output, cache = call(
            cache, query[:, part], key[:, part], value[:, part], positions[:, part]
        )
        np.testing.assert_allclose(output, expected[:, part], rtol=1e-5, atol=1e-6)
    full = RingCache(key[:, 8:], value[:, 8:], positions[:, 8:], jnp.full((BATCH,), LENGTH))
    order = np.arange(8, 13)[np.argsort(np.arange(8, 13) % CAPACITY)] - 8  # As it wraps.
    wrapped = jax.tree.map(lambda x: x[:, order] if x.ndim > 1 else x, full)
    grown = larger_ring(wrapped, 11)
    assert grown.positions[0].tolist() == [11, 12, *[-1] * 6, 8, 9, 10]
    np.testing.assert_array_equal(grown.keys[:, 12 % 11], key[:, 12])


def test_padding_is_neither_seen_nor_kept_and_sequences_keep_their_own_count():
    query, key, value = sample(4)
    positions = jnp.asarray([[0, 1, 2, -1], [0, -1, -1, -1]])
    output, cache = call(empty(), query, key, value, positions)
    assert cache.next_position.tolist() == [3, 1]
    assert cache.positions.tolist() == [[0, 1, 2, -1, -1], [0, -1, -1, -1, -1]]
    np.testing.assert_array_equal(output[1, 1:], 0)
    np.testing.assert_allclose(output[1, 0], jnp.repeat(value[1, 0], 2, axis=0), rtol=1e-6)


def test_a_long_cache_is_neither_copied_nor_scored_at_once():
    capacity, length = 4096, 8
    query, key, value = sample(length)
    positions = jnp.broadcast_to(jnp.arange(length), (BATCH, length))

    def step(cache, query, key, value):
        options = {"positions": positions, "max_scores": BATCH * HEADS * length * 64}
        output = ring_attention(query, key, value, cache, **options)
        return output, put_in_ring(cache, key, value, positions=positions, after=output)

    compiled = jax.jit(step, donate_argnums=0).lower(empty(capacity), query, key, value).compile()
    one_block = 4 * BATCH * HEADS * length * 64
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * one_block
    assert 8 * one_block < 4 * BATCH * KV_HEADS * HEAD * capacity * 2  # Of the cache.
