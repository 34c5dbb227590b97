import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.paper.data.longcrawl64 import longcrawl64

END = 50_256
# As published, but for the sizes: 6609334 x 65536 in chunks of 2048 x 2048.
METADATA = {
    "chunks": [3, 4],
    "compressor": {"blocksize": 0, "clevel": 5, "cname": "lz4", "id": "blosc", "shuffle": 1},
    "dtype": "<u2",
    "fill_value": 0,
    "filters": None,
    "order": "C",
    "shape": [7, 10],
    "zarr_format": 2,
}


@pytest.fixture(scope="module")
def decoder(vocabulary):
    return load_tokenizer(vocabulary)


@pytest.fixture
def rows():
    """Seven documents of ten letters; the fifth row holds two and a blank one."""
    rows = np.random.default_rng(0).integers(32, 58, (7, 10)).astype(np.uint16)
    rows[4, [0, 4, 5]] = END
    return rows


def write_array(folder, rows):
    path = folder / "train.zarr"
    store = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    metadata = METADATA | {"shape": list(np.shape(rows))}
    array = tensorstore.open({**store, "metadata": metadata}, create=True).result()
    array[...] = np.asarray(rows, np.uint16)
    return path


@pytest.fixture
def array(tmp_path, rows):
    path = write_array(tmp_path, rows)
    assert {**json.loads((path / ".zarray").read_text()), **METADATA} == json.loads(
        (path / ".zarray").read_text()
    )
    return path


@pytest.fixture
def expected(rows, decoder):
    texts = [decoder.decode(row) for row in rows]
    texts[4:5] = [decoder.decode(rows[4, 1:4]), decoder.decode(rows[4, 6:])]
    return texts


def test_a_document_is_a_row_cut_at_its_ends_of_text(array, vocabulary, expected, texts_of):
    assert all(text.isalpha() for text in expected)
    assert texts_of(longcrawl64(array, vocabulary=vocabulary)) == expected


def test_limits_count_rows(array, vocabulary, expected, texts_of):
    source = longcrawl64(array, vocabulary=vocabulary, start=2, stop=5)
    assert texts_of(source) == expected[2:6]


def test_every_document_can_be_gone_on_from(array, vocabulary, goes_on):
    for span in longcrawl64(array, vocabulary=vocabulary).spans:
        assert len({piece.place.record for piece in goes_on(span.part)}) == span.part.count()


def test_the_inputs_are_the_chunks_that_were_read(array, vocabulary):
    parts = [span.part for span in longcrawl64(array, vocabulary=vocabulary).spans]
    assert [sorted(part.files) for part in parts] == [
        [f"train.zarr/{row}.{column}" for column in range(3)] for row in range(3)
    ]
    assert all(file.path.is_file() for part in parts for file in part.files.values())


def test_missing_chunks_are_not_read_as_zeros(array, vocabulary, expected, texts_of):
    (array / "1.2").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 chunk files in 1 of 3 rows of chunks, .*1\.2"):
        longcrawl64(array, vocabulary=vocabulary)
    source = longcrawl64(array, vocabulary=vocabulary, missing_chunks="skip")
    assert texts_of(source) == expected[:3] + expected[7:]
    assert source.settings["rows_of_chunks_skipped"] == 1
    for chunk in array.glob("[0-9]*"):
        chunk.unlink()
    with pytest.raises(ValueError, match="lacks 9 chunk files in 3 of 3"):
        longcrawl64(array, vocabulary=vocabulary, missing_chunks="skip")


def test_a_damaged_chunk_is_named(array, vocabulary, texts_of):
    (array / "2.0").write_bytes((array / "2.0").read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"train\.zarr: rows 6 to 7 cannot be read"):
        texts_of(longcrawl64(array, vocabulary=vocabulary))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "<i4"}, r"\(2, '<i4', 'C', 2\), not"),
        ({"shape": [7]}, r"\(2, '<u2', 'C', 1\), not"),
        ({"zarr_format": 3}, r"\(3, '<u2', 'C', 2\), not"),
        ({"chunks": None}, "describes no array"),
    ],
)
def test_an_array_of_another_kind_is_refused(array, vocabulary, change, message):
    (array / ".zarray").write_text(json.dumps({**METADATA, **change}))
    with pytest.raises(ValueError, match=message):
        longcrawl64(array, vocabulary=vocabulary)


def test_ids_of_another_tokenizer_are_refused(tmp_path, vocabulary, texts_of):
    array = write_array(tmp_path, [[50_257]])
    with pytest.raises(ValueError, match="token id 50257 is not one of the 50257 ids"):
        texts_of(longcrawl64(array, vocabulary=vocabulary))


def test_what_is_missing_is_said_with_its_address(tmp_path, array, vocabulary):
    with pytest.raises(FileNotFoundError, match=r"no.zarr/\.zarray; .*clankur/longcrawl64"):
        longcrawl64(tmp_path / "no.zarr", vocabulary=vocabulary)
    with pytest.raises(ValueError, match=r"no\.json.*; download tokenizer\.json .*gpt2"):
        longcrawl64(array, vocabulary=str(tmp_path / "no.json"))


def test_without_its_package_the_extra_is_named(array, vocabulary, monkeypatch, texts_of):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[data\]'"):
        texts_of(longcrawl64(array, vocabulary=vocabulary))


def test_a_character_that_was_cut_reads_as_a_replacement(tmp_path, vocabulary, texts_of):
    pieces = json.loads(Path(vocabulary).read_text())["model"]["vocab"]
    ids = [pieces[piece] for piece in ("Ã", "©", "Ġ!AA", "Ã")]
    array = write_array(tmp_path, [ids])
    # From GPT-2's published vocabulary: Ġ is a space, Ã and © are the two bytes of é.
    assert texts_of(longcrawl64(array, vocabulary=vocabulary)) == ["é !AA\ufffd"]


def test_a_tokenizer_that_is_not_gpt2s_is_refused(array):
    with pytest.raises(ValueError, match="bytes is not GPT-2's vocabulary"):
        longcrawl64(array, vocabulary="bytes")
