import gzip
import json

import fsspec
import numpy as np
import pytest

from fwpkm_jax.data.json_lines import Place
from fwpkm_jax.data.prepare import Source, Span, select, text_files
from fwpkm_jax.data.streams.formats import Piece
from tests.data.plain_writer import write_token_file
from tests.data.test_streams import parquet_bytes


class Numbers:
    def __init__(self, name, size):
        self.name, self.size, self.files = name, size, {}

    def count(self):
        return self.size

    def read(self, tokenizer, start):
        return (Piece(Place(n), f"{self.name}{n}", "") for n in range(start.record, self.size))


PARTS = [Numbers("a", 3), Numbers("b", 0), Numbers("c", 4)]
ALL = ["a0", "a1", "a2", "c0", "c1", "c2", "c3"]


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("stop", [None, 1, 2, 3, 4, 6, 7, 9])
def test_a_selection_is_a_slice_of_the_parts_laid_end_to_end(start, stop, texts_of):
    if stop is not None and stop <= start:
        with pytest.raises(ValueError, match=f"start={start} and stop={stop} leave no record"):
            select(PARTS, start=start, stop=stop)
        return
    source = Source(name="numbers", spans=select(PARTS, start=start, stop=stop))
    assert texts_of(source) == ALL[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-3, -1), (-7, -5), (-2, None), (-4, 0)])
def test_a_selection_counts_from_the_end(start, stop, texts_of):
    source = Source(name="numbers", spans=select(PARTS, start=start, stop=stop))
    assert texts_of(source) == ALL[start : stop or None]
    with pytest.raises(ValueError, match="hold 7 records, and 8 are to be the last"):
        select(PARTS, start=-8)


def test_parts_are_counted_only_for_limits():
    part = Numbers("a", 3)
    part.count = None
    assert select([part]) == (Span(part, 0, None),)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    records = [{"text": "one"}, {"text": ""}, {"text": "two", "title": "Two"}, {"text": "später"}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "a.txt").write_text("It was.\n")
    (folder / "deep" / "c.txt").write_text("")
    (folder / "README.md").write_text("not a text")
    return folder


def test_text_files_come_in_sorted_order_without_blank_documents(folder, texts_of):
    assert texts_of(text_files(folder)) == ["It was.\n", "one", "two", "später"]
    assert texts_of(text_files(folder / "a.txt")) == ["It was.\n"]


def test_limits_count_lines_and_files(folder, texts_of):
    assert texts_of(text_files(folder, start=1, stop=4)) == ["one", "two"]
    assert texts_of(text_files(folder / "b.jsonl", start=3)) == ["später"]


def test_the_text_may_be_in_another_field(folder, texts_of):
    (folder / "b.jsonl").write_text('{"title": "Two"}')
    assert texts_of(text_files(folder / "b.jsonl", field="title")) == ["Two"]


def test_a_line_that_is_no_text_is_named(folder, texts_of):
    (folder / "b.jsonl").write_text('{"text": "one"}\n\n{"text": 5}')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: field 'text' is a int"):
        texts_of(text_files(folder))


def test_a_tokenised_file_is_read_by_its_entries(folder, texts_of):
    write_token_file(
        folder / "d.bin", [np.asarray([97, 256]), np.asarray([98, 256])], vocab_size=257
    )
    source = text_files(folder / "d.bin", start=1)
    assert texts_of(source) == ["b"]


def test_objects_of_a_bucket_and_parquet_files_are_read_alike(texts_of):
    store = fsspec.filesystem("memory")
    store.pipe("/prepare/a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    store.pipe("/prepare/b.parquet", parquet_bytes(["three", None, "four"]))
    try:
        source = text_files("memory://prepare", start=1)
        assert texts_of(source) == ["two", "three", "four"]
        assert [span.part.name for span in source.spans] == ["a.jsonl.gz", "b.parquet"]
    finally:
        store.rm("/prepare", recursive=True)
