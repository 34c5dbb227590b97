"""Cutting into chunks and groups and joining again, and the scan over chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwpkm_jax.core.chunks import (
    Chunk,
    StepOutput,
    from_chunks,
    map_groups,
    merge_groups,
    scan_chunks,
    split_groups,
    to_chunks,
)


@pytest.mark.slow
@given(
    batch=st.integers(1, 3),
    num_chunks=st.integers(1, 3),
    chunk_size=st.integers(1, 4),
    rest=st.integers(0, 3),
)
def test_chunks_hold_the_same_times_of_all_sequences_and_merge_back(
    batch, num_chunks, chunk_size, rest
):
    rest = min(rest, chunk_size - 1)
    length = num_chunks * chunk_size + rest
    x = np.arange(2 * batch * length * 3).reshape(2, batch, length, 3)
    chunks = to_chunks(jnp.asarray(x), chunk_size)
    filled = np.pad(x, ((0, 0), (0, 0), (0, -length % chunk_size), (0, 0)))
    for index in range(chunks.shape[1]):
        times = slice(index * chunk_size, (index + 1) * chunk_size)
        for group in range(2):
            expected = np.concatenate(filled[group, :, times])
            np.testing.assert_array_equal(chunks[group, index], expected)
    np.testing.assert_array_equal(from_chunks(chunks, batch, length), x)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups_hold_neighbours_and_merge_back(groups):
    x = np.arange(12).reshape(6, 2)
    split = split_groups(jnp.asarray(x), groups)
    np.testing.assert_array_equal(split, np.stack(np.split(x, groups)))
    np.testing.assert_array_equal(merge_groups(split), x)


def test_groups_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"6 sequences does not divide into 4 .* choose a divisor"):
        split_groups(jnp.zeros((6, 2)), 4)


@pytest.mark.parametrize("groups", [1, 3])
def test_mapping_over_groups_is_a_loop_over_them(groups):
    memory = jnp.arange(groups * 2.0).reshape(groups, 2)
    x = jnp.arange(groups * 4.0).reshape(groups, 4)

    def function(memory, x):
        return {"memory": memory * jnp.sum(x), "x": x + memory[0]}

    mapped = map_groups(function, memory, x)
    for group in range(groups):
        alone = function(memory[group], x[group])
        jax.tree.map(np.testing.assert_array_equal, alone, {k: v[group] for k, v in mapped.items()})


def sequence(batch, length):
    """Tokens that know their sequence and time."""
    times = np.arange(length, dtype=np.float32)
    query = 100 * np.arange(batch, dtype=np.float32)[:, None] + times
    scalar = jnp.asarray(query)
    wide = scalar[..., None]
    return Chunk(wide[..., None], wide, scalar, scalar, scalar)


def record(memory, chunk):
    """Outputs each token with the memory; the memory is a decayed sum over the chunk."""
    output = chunk.target + memory
    after = memory / 2 + jnp.sum(chunk.write_weight)
    return StepOutput(after, output, {"access": chunk.counted}, {"size": jnp.max(chunk.target)})


@pytest.mark.parametrize(("length", "chunk_size"), [(6, 2), (7, 3), (2, 5), (5, 5), (3, 1)])
def test_the_scan_is_a_loop_over_chunks_with_a_short_last_one(length, chunk_size):
    batch, memory = 2, 1.0
    whole = sequence(batch, length)
    x = np.asarray(whole.write_weight)
    outputs, infos = [], []
    for start in range(0, length, chunk_size):
        piece = x[:, start : start + chunk_size]
        outputs.append(piece + memory)
        infos.append(piece.max())
        memory = memory / 2 + piece.sum()
    out = jax.jit(lambda s: scan_chunks(record, jnp.float32(1), s, chunk_size=chunk_size))(whole)
    np.testing.assert_allclose(out.memory, memory, rtol=1e-6)
    np.testing.assert_allclose(out.output[..., 0], np.concatenate(outputs, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(out.access["access"], x)
    np.testing.assert_array_equal(out.info["size"], infos)


def test_no_chunk_and_no_token_are_refused():
    with pytest.raises(ValueError, match="chunk_size=0 must be at least 1"):
        scan_chunks(record, jnp.float32(1), sequence(2, 4), chunk_size=0)
    with pytest.raises(ValueError, match="at least one token, got length 0"):
        scan_chunks(record, jnp.float32(1), sequence(2, 0), chunk_size=2)
