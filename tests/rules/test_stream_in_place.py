"""A token of a stream costs what it touches: neither the table nor the queue is copied for it."""

import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.core.chunks import map_unshared
from fwpkm_jax.core.streams import streaming
from fwpkm_jax.core.streams.pending import Signals, init_pending
from fwpkm_jax.core.targets import WriteWeights
from fwpkm_jax.rules import FwPKM

RULE = FwPKM(num_subkeys=64, key_dim=16, value_dim=32, top_k=4)
CHUNK = 24


def compiled_push(length, *, groups=1, capacity=None):
    """Of memories whose tables are arrays, or overlays with a capacity."""
    memory = RULE.init(jax.random.key(0))
    one = Signals(
        jnp.zeros((1, 1, 1, RULE.key_dim)),
        jnp.zeros((1, 1, RULE.value_dim)),
        jnp.zeros((1, 1)),
        jnp.zeros((1, 1)),
    )
    memory, one = jax.tree.map(lambda x: x[None], (memory, one))
    if capacity is not None:
        memory = RULE.overlay(memory, memory, capacity=capacity)
    memory, one = map_unshared(lambda x: jnp.repeat(x, groups, axis=0), (memory, one))
    pending = init_pending(one, CHUNK + RULE.lookahead)
    piece = jax.tree.map(lambda x: jnp.repeat(x, length, axis=2), one)

    def push(memory, pending, piece):
        return streaming.push(RULE, memory, pending, piece, chunk_size=CHUNK)

    lowered = jax.jit(push, donate_argnums=(0, 1)).lower(memory, pending, piece)
    return lowered.compile().as_text()


def copies(text, *shape):
    """Instructions that copy an array of this shape, whatever axes of length 1 it has."""
    shapes = {f"f32[{','.join(map(str, s))}]" for s in (shape, (1, *shape))}
    return [
        line.strip()
        for line in text.splitlines()
        if (" copy(" in line or " copy-start(" in line) and any(f"= {s}" in line for s in shapes)
    ]


@pytest.mark.thorough("1")
@pytest.mark.compiled_text
@pytest.mark.parametrize("length", [1, 5])
def test_a_piece_of_a_stream_copies_no_table(length):
    text = compiled_push(length)
    assert "while" in text  # Of the write, which most tokens skip.
    assert copies(text, RULE.num_slots, RULE.value_dim) == []


@pytest.mark.thorough
@pytest.mark.compiled_text
def test_a_token_of_several_memories_copies_no_other_memorys_table():
    text = compiled_push(1, groups=3)
    assert copies(text, 3, RULE.num_slots, RULE.value_dim) == []


@pytest.mark.slow
def test_a_token_is_queued_in_place():
    entry = compiled_push(1).split("ENTRY")[1]
    assert copies(entry, CHUNK + RULE.lookahead, RULE.value_dim) == []


@pytest.mark.slow
def test_a_read_of_the_old_table_after_the_write_is_seen_as_a_copy():
    """What the tests above look for is there where a program needs it."""
    memory = RULE.init(jax.random.key(0))
    query = jnp.zeros((1, 1, RULE.key_dim))
    weights = WriteWeights(*(jnp.ones((1,)) for _ in range(3)))
    chunk = RULE.chunk(query, jnp.zeros((1, RULE.value_dim)), weights)

    def write_and_read_the_old(memory, chunk, query):
        return RULE.write(memory, chunk), RULE.read(memory, query)[0]

    lowered = jax.jit(write_and_read_the_old, donate_argnums=0).lower(memory, chunk, query)
    text = lowered.compile().as_text()
    assert copies(text, RULE.num_slots, RULE.value_dim)


@pytest.mark.thorough("1")
@pytest.mark.two_phase
@pytest.mark.compiled_text
@pytest.mark.parametrize("groups", [1, 3])
def test_a_token_of_overlays_copies_no_base(groups):
    text = compiled_push(1, groups=groups, capacity=40)
    assert copies(text, RULE.num_slots, RULE.value_dim) == []
    assert copies(text, *([groups] if groups > 1 else []), 41, RULE.value_dim) == []  # Own rows.
