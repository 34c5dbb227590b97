import numpy as np
import pytest

from fwpkm_jax.data.packing import PackedRows, cut_rows


@pytest.mark.parametrize("length", [1, 2, 4, 6, 20])
@pytest.mark.parametrize("sizes", [[21], [5, 16], [1, 1, 0, 18, 1], [0, 3, 0, 0, 18, 0]])
def test_rows_laid_end_to_end_are_the_corpus(length, sizes):
    corpus = np.random.default_rng(0).integers(1000, size=sum(sizes)).astype(np.uint16)
    segments = np.split(corpus, np.cumsum(sizes)[:-1])
    rows = PackedRows(segments, length=length)
    assert len(rows) == 21 // (length + 1)
    laid_out = np.concatenate([rows[index]["tokens"] for index in range(len(rows))])
    assert laid_out.dtype == np.int32
    np.testing.assert_array_equal(laid_out, corpus[: len(rows) * (length + 1)])
    written = list(cut_rows(segments, row_length=length + 1))
    np.testing.assert_array_equal(np.concatenate(written), laid_out)


def test_every_label_of_text_counts_once():
    row = PackedRows([np.arange(10)], length=4)[1]
    assert row["loss_weight"].dtype == np.float32
    np.testing.assert_array_equal(row["loss_weight"], [1, 1, 1, 1])


def test_no_segment_makes_no_row():
    rows = PackedRows([], length=4)
    assert (len(rows), rows.num_tokens) == (0, 0)
