import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwpkm_jax.evaluation.readers.segments import (
    cut_into_pieces,
    pad_into_pieces,
    pairs_left_by_the_reference,
    piece_sizes,
    split_into_segments,
)


def labels(num_tokens: int, segment_length: int, segmentation) -> list[int]:
    segments = split_into_segments(
        num_tokens, segment_length=segment_length, segmentation=segmentation
    )
    return [t for s in segments for t in range(s.start + 1, s.start + s.length + 1)]


@given(num_tokens=st.integers(0, 200), segment_length=st.integers(1, 40))
def test_every_token_but_the_first_is_scored_exactly_once(num_tokens, segment_length):
    assert labels(num_tokens, segment_length, "overlap") == list(range(1, num_tokens))


@given(num_tokens=st.integers(2, 200), segment_length=st.integers(1, 40))
def test_segments_are_full_except_the_last(num_tokens, segment_length):
    *full, last = split_into_segments(num_tokens, segment_length=segment_length)
    assert {s.length for s in full} <= {segment_length}
    assert 1 <= last.length <= segment_length


def test_the_reference_drift_loses_the_labels_that_the_protocol_counts():
    # "A 70 000-token document loses 153 labels": k tokens behind segment k, and the first token
    # of each of the 17 later segments.
    found = labels(70_000, 4096, "reference")
    assert len(set(found)) == len(found) == 69_999 - 153


def test_the_reference_segments_are_k_inputs_shorter():
    segments = split_into_segments(500, segment_length=100, segmentation="reference")
    assert segments == [(0, 100), (101, 99), (202, 98), (303, 97), (404, 95)]


def test_a_segment_without_inputs_is_refused():
    with pytest.raises(ValueError, match="segment_length=0"):
        split_into_segments(10, segment_length=0)


@given(segment_length=st.integers(1, 5000), share=st.floats(0, 1))
def test_few_piece_sizes_make_up_every_length(segment_length, share):
    sizes = piece_sizes(segment_length)
    length = round(share * segment_length)
    pieces = cut_into_pieces(length, sizes)
    assert sum(pieces) == length
    assert set(pieces) <= set(sizes)
    assert len(sizes) <= 2 + np.log(segment_length) / np.log(4)
    assert max((pieces.count(size) for size in sizes[1:]), default=0) <= 3
    padded = pad_into_pieces(length, sizes)
    assert len(padded) == (length > 0)
    assert segment_length >= sum(padded) >= length


def test_a_text_of_several_pieces_is_padded_at_its_end_only():
    assert pad_into_pieces(2 * 15 + 5, piece_sizes(15)) == [15, 15, 15]
    assert pad_into_pieces(15 + 3, piece_sizes(15)) == [15, 4]


@pytest.mark.parametrize(("length", "writes"), [(4096, True), (4095, False), (4097, False)])
def test_the_reference_writes_once_more_at_the_end_of_a_whole_number_of_chunks(length, writes):
    # Protocol 1.4: 4096 tokens are written 8 times, 4095 only 7 times. Ours has written
    # (length - 1) // 512 times when the segment ends: 7 of the 8, 7 of the 7.
    assert pairs_left_by_the_reference(length, chunk_size=512, lookahead=1) == writes
