import json

import pytest

from fwpkm_jax.data.prepare import Record, Source, Span, select
from fwpkm_jax.data.prepare.text_files import text_files


class Numbers:
    def __init__(self, name, size):
        self.name, self.size, self.files = name, size, {}

    def count(self):
        return self.size

    def read(self, start):
        return (Record(n + 1, (f"{self.name}{n}",)) for n in range(start, self.size))


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


def test_a_selection_without_records_is_refused():
    with pytest.raises(ValueError, match="The parts hold 7 records, none from number 7 on"):
        select(PARTS, start=7)


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


def test_tokenised_files_are_not_taken_for_text(folder):
    (folder / "x.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"x\.bin is tokenised already"):
        text_files(folder)
