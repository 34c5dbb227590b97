import pickle

import numpy as np
import pytest

from fwpkm_jax.data.token_files import TokenFile
from tests.data.plain_writer import cut_rows, write_token_file

DOCUMENTS = [np.arange(5), np.asarray([65535, 0, 7]), np.asarray([], np.int64), np.arange(40, 49)]


def write(path, entries=DOCUMENTS, **arguments):
    return write_token_file(path, entries, **{"vocab_size": 65536, **arguments})


def test_documents_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "stream.bin"
    assert write(path) == 17
    file = TokenFile(path, vocab_size=65536)
    assert (len(file), file.num_entries) == (17, 4)
    for index, document in enumerate(DOCUMENTS):
        np.testing.assert_array_equal(file.entry(index), document)
    np.testing.assert_array_equal(file[0:17], np.concatenate(DOCUMENTS))


def test_bytes_on_disk_follow_the_papers_layout(tmp_path):
    write(tmp_path / "x.bin", [np.asarray([1, 258]), np.asarray([3])])
    assert (tmp_path / "x.bin").read_bytes() == b"\x01\x00\x02\x01\x03\x00"
    assert (tmp_path / "x.idx").read_text() == "2 0\n1 4\n"


def test_rows_drop_the_remainder_and_hold_the_concatenation(tmp_path):
    path = tmp_path / "l3.bin"
    assert write(path, cut_rows(DOCUMENTS, row_length=4)) == 16
    file = TokenFile(path, vocab_size=65536)
    assert file.num_entries == 4
    np.testing.assert_array_equal(
        np.concatenate([file.entry(index) for index in range(4)]), np.concatenate(DOCUMENTS)[:16]
    )


@pytest.mark.parametrize(("cap", "entries"), [(1, 1), (5, 1), (6, 2), (8, 2), (9, 4), (100, 4)])
def test_a_capped_file_ends_with_the_entry_that_reaches_the_cap(tmp_path, cap, entries):
    write(tmp_path / "x.bin", max_tokens=cap)
    assert TokenFile(tmp_path / "x.bin", vocab_size=65536).num_entries == entries


def test_a_pickled_file_carries_no_tokens(tmp_path):
    write(tmp_path / "x.bin", [np.zeros(100_000, np.int64)])
    file = TokenFile(tmp_path / "x.bin", vocab_size=1)
    assert not file[0:100_000].any()
    pickled = pickle.dumps(file)
    assert len(pickled) < 2_000
    assert len(pickle.loads(pickled)[0:100_000]) == 100_000


def test_an_empty_file_has_no_entries(tmp_path):
    write(tmp_path / "x.bin", [])
    file = TokenFile(tmp_path / "x.bin", vocab_size=2)
    assert (len(file), file.num_entries, file[0:0].size) == (0, 0, 0)


@pytest.mark.parametrize("missing", ["x.bin", "x.idx"])
def test_half_a_pair_is_refused(tmp_path, missing):
    write(tmp_path / "x.bin")
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"There is no .*{missing}.*write_token_file` from"):
        TokenFile(tmp_path / "x.bin", vocab_size=65536)


def test_what_is_no_row_of_ids_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "x.bin"
    write(path, [[1, 2], []])
    for entries, message in (
        ([[1.5]], r"Entry 0 is float64\[1\]; give integers"),
        ([[1], [[2]]], r"Entry 1 is int64\[1, 1\]"),
        ([[1], [-1]], "Entry 1 holds the id -1"),
    ):
        with pytest.raises(ValueError, match=message):
            write(path, entries)
    assert TokenFile(path, vocab_size=65536)[0:9].tolist() == [1, 2]


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    write(tmp_path / "x.bin", [np.asarray([1, 2]), np.asarray([3, 400])])
    file = TokenFile(tmp_path / "x.bin", vocab_size=257)
    np.testing.assert_array_equal(file.entry(0), [1, 2])
    with pytest.raises(ValueError, match=r"x.bin holds the id 400 at token 3, .* of 257"):
        file.entry(1)


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1, 151_936])
def test_any_vocabulary_comes_back_with_two_bytes_a_token_where_they_suffice(tmp_path, vocab_size):
    entries = [np.asarray([0, vocab_size - 1, 7]), np.asarray([65_535])]
    write(tmp_path / "x.bin", entries, vocab_size=vocab_size)
    file = TokenFile(tmp_path / "x.bin", vocab_size=vocab_size)
    np.testing.assert_array_equal(file[0:4], np.concatenate(entries))
    np.testing.assert_array_equal(file.entry(0, slice(1, 3)), entries[0][1:])
    wide = vocab_size > 2**16
    assert (tmp_path / "x.bin").stat().st_size == 4 * (4 if wide else 2)
    first = (tmp_path / "x.idx").read_text().splitlines()[0]
    assert first == ("# uint32" if wide else "3 0")
