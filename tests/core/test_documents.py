"""Where documents start, their positions, and cumulative lengths, against loops over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.documents import (
    cu_seqlens_from_segment_ids,
    document_numbers,
    document_positions,
    document_starts,
    pack_starts,
    segment_ids_from_cu_seqlens,
)
from fwpkm_jax.core.padding import pack_tokens

IDS = np.array([[5, 5, 2, 2, 2, 9, 0, 0], [0, 3, 0, 3, 3, 3, 1, 1]])


def test_starts_numbers_and_positions_follow_the_ids():
    before = jnp.array([5, 0])
    starts = document_starts(jnp.asarray(IDS), before=before)
    first = jnp.array([4, 7])
    numbers, positions = document_numbers(starts), document_positions(starts, first=first)
    for row in range(2):
        last, number, position = int(before[row]), 0, int(first[row]) - 1
        for at, own in enumerate(IDS[row]):
            new = own != last
            number, position, last = number + new, 0 if new else position + 1, own
            assert (starts[row, at], numbers[row, at]) == (new, number)
            assert positions[row, at] == position
    assert bool(document_starts(jnp.asarray(IDS))[:, 0].all())


def test_a_start_at_padding_passes_to_the_next_token():
    mask = jnp.array([[0, 1, 1, 0, 0, 1, 1, 0]], bool)
    starts = jnp.array([[1, 0, 0, 1, 0, 0, 1, 1]], bool)
    packed = pack_starts(starts, pack_tokens(mask))
    assert packed[0].tolist() == [True, False, True, True, False, False, False, False]


def test_cu_seqlens_come_back_as_they_went_in():
    lengths = np.array([3, 1, 2])
    ends = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    ids = segment_ids_from_cu_seqlens(ends, length=8)
    np.testing.assert_array_equal(ids[0], [*np.repeat([1, 2, 3], lengths), 0, 0])
    back = cu_seqlens_from_segment_ids(ids, max_documents=4)
    np.testing.assert_array_equal(back, [*ends, ends[-1]])
    with pytest.raises(ValueError, match="segment_ids has 2 rows"):
        cu_seqlens_from_segment_ids(jnp.asarray(IDS), max_documents=3)
