import numpy as np
import pytest

from fwpkm_jax.data.packing import BestFitRows, PackedRows
from tests.data.plain_writer import cut_rows


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


def test_rows_with_segment_ids_hide_labels_across_documents():
    corpus = [np.array([5, 6, 9, 9, 7]), np.array([8, 9, 4, 4, 9, 1])]
    rows = PackedRows(corpus, length=4, eos_id=9)
    np.testing.assert_array_equal(rows[0]["segment_ids"], [1, 1, 1, 2])
    np.testing.assert_array_equal(rows[0]["loss_weight"], [1, 1, 0, 0])
    np.testing.assert_array_equal(rows[1]["segment_ids"], [1, 1, 2, 2])
    np.testing.assert_array_equal(rows[1]["loss_weight"], [1, 0, 1, 1])
    np.testing.assert_array_equal(rows[0]["tokens"], [5, 6, 9, 9, 7])


@pytest.mark.parametrize("length", [3, 7, 16])
def test_best_fit_keeps_documents_whole_and_loses_no_token(length):
    rng = np.random.default_rng(length)
    sizes = rng.integers(1, 14, size=40)
    values = np.split(np.arange(1, 1 + sizes.sum()), np.cumsum(sizes)[:-1])
    rows, found, padding = BestFitRows(values, length=length), [], 0
    for index in range(len(rows)):
        row = rows[index]
        tokens, ids = row["tokens"], row["segment_ids"]
        assert (tokens.dtype, ids.dtype, len(tokens), len(ids)) == (
            np.int32, np.int32, length + 1, length,
        )  # fmt: skip
        # A label counts where it is the token after its input in a document.
        follows = (tokens[1:] == tokens[:-1] + 1) & np.isin(
            tokens[1:], [d[0] for d in values], invert=True
        )
        np.testing.assert_array_equal(row["loss_weight"], follows & (ids != 0))
        assert np.all((ids == 0) == (tokens[:-1] == 0))
        padding += np.sum(tokens == 0)
        found.extend(tokens[tokens != 0])
    # Tokens that stand alone have no label; all others are in one row each.
    pieces = [d[i : i + length + 1] for d in values for i in range(0, len(d), length + 1)]
    expected = np.concatenate([p for p in pieces if len(p) > 1])
    np.testing.assert_array_equal(np.sort(found), expected)
    assert rows.num_tokens == len(expected)
    assert rows.padding == pytest.approx(padding / (len(rows) * (length + 1)))
    assert len(rows) <= 1.3 * -(-len(expected) // (length + 1)) + 1
    assert sum(len(p) == length + 1 for p in pieces) <= len(rows)
