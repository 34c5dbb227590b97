"""A chunk written block by block is the chunk written at once, and takes little memory."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from fwpkm_jax.core.chunks import AnyChunk
from fwpkm_jax.core.slots.options.blocks import ChunkBlocks
from fwpkm_jax.core.slots.write import SlotChunk
from fwpkm_jax.rules import FwMLP, FwPKM
from tests.rules.sampling import init_memory, sample_signals, to_sequence

SIZE, LENGTH = 4, 10  # Two full blocks and half of one.
RULES = {
    "fwpkm": FwPKM.tiny(),
    "fwpkm_dot": dataclasses.replace(FwPKM.tiny(), score="dot", addressing_weight=0.5),
    "fwpkm_scan": dataclasses.replace(FwPKM.tiny(), key_loss="both", weight_decay=0.1),
    "fwmlp": FwMLP.tiny(),
}


def blocks_of(chunk: AnyChunk, size: int, most: int) -> ChunkBlocks:
    """Blocks of a chunk; tokens added behind its end weigh nothing."""
    length = chunk.write_weight.shape[0]
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, most * size - length)] + [(0, 0)] * (x.ndim - 1)), chunk
    )

    def block(number: jax.Array) -> AnyChunk:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size), padded)

    return ChunkBlocks(block, jnp.int32(-(-length // size)), most)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_blocks_write_what_the_chunk_writes(rule):
    signals = sample_signals(rule, batch=1, length=LENGTH, masked=True)
    sequence = to_sequence(rule, signals, chunk_size=LENGTH, dtype=jnp.float64)
    chunk = jax.tree.map(lambda x: x[0], sequence)
    memory = init_memory(rule, jnp.float64)
    whole = jax.jit(rule.write)(memory, chunk)
    # One block more than there are tokens for: it is never asked for.
    write = jax.jit(lambda memory, chunk: rule.write_blocks(memory, blocks_of(chunk, SIZE, 4)))
    chex.assert_trees_all_close(write(memory, chunk), whole, rtol=1e-10, atol=1e-12)
    moved = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), whole, memory)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.slow
@pytest.mark.two_phase
def test_a_chunk_of_many_blocks_keeps_one_error_per_token_and_copies_no_table():
    rule = FwPKM(num_subkeys=64, key_dim=64, value_dim=64, top_k=8)
    size, most = 128, 64
    memory = jax.eval_shape(rule.init, jax.random.key(0))

    def write(memory, query, value):
        def block(number: jax.Array) -> SlotChunk:
            part = [jax.lax.dynamic_slice_in_dim(x, number * size, size) for x in (query, value)]
            return SlotChunk(*part, *[jnp.ones((size,))] * 4)

        return rule.write_blocks(memory, ChunkBlocks(block, jnp.int32(most), most))

    query = jax.ShapeDtypeStruct((most * size, 1, rule.key_dim), jnp.float32)
    value = jax.ShapeDtypeStruct((most * size, rule.value_dim), jnp.float32)
    compiled = jax.jit(write, donate_argnums=0).lower(memory, query, value).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    errors = 4 * most * size * rule.value_dim
    addresses = 4 * most * size * rule.top_k * 7
    one_block = 4 * size * (rule.top_k * rule.value_dim + 8 * rule.num_subkeys)
    assert temporary < errors + addresses + 2 * one_block
    at_once = jax.jit(rule.write, donate_argnums=0).lower(
        memory, SlotChunk(query, value, *[jax.ShapeDtypeStruct((most * size,), jnp.float32)] * 4)
    )
    assert at_once.compile().memory_analysis().temp_size_in_bytes > 4 * temporary
