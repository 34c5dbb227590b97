import json
from pathlib import Path

import pytest

from fwpkm_jax.data import sample
from fwpkm_jax.data.documents import find_files, read_documents


def write_jsonl(path, *records):
    path.write_bytes(
        b"".join(
            record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n"
            for record in records
        )
    )
    return path


def test_records_come_in_order_named_by_their_id_or_line(tmp_path):
    path = write_jsonl(
        tmp_path / "x.jsonl",
        {"id": "first", "text": "one\ntwo"},
        b"\n",
        {"text": "später", "title": "a"},
        {"text": ""},
        {"id": 0, "text": "</s> "},
    )
    assert list(read_documents(path, field="text")) == [
        ("first", "one\ntwo"),
        ("x.jsonl:3", "später"),
        ("0", "</s> "),
    ]


def test_the_field_can_be_chosen(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", {"text": "no", "content": "yes"})
    assert [text for _, text in read_documents(path, field="content")] == ["yes"]


def test_a_text_file_is_one_document_to_the_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(b" a\r\nb\x00\n")
    assert list(read_documents(tmp_path / "x.txt", field="text")) == [("x.txt", " a\r\nb\x00\n")]


def test_an_empty_text_file_is_no_document(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"")
    assert list(read_documents(tmp_path / "x.txt", field="text")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"title": "x", "body": "y"}\n', r"line 2 has no field 'text', only 'title', 'body'"),
        (b"{}\n", "line 2 has no field 'text', only none"),
        (b'{"text": 5}\n', "line 2: field 'text' is a int"),
        (b'["text"]\n', "line 2 is a list, not a JSON object"),
        (b'{"text": "x"\n', "line 2 is not JSON: .*column"),
        (b'{"text": "\xff"}\n', "not UTF-8: byte 0xff at offset 24, line 2"),
        (b'{"text": "\\ud800"}\n', r"line 2: field 'text' holds half a surrogate pair, \\ud800"),
    ],
)
def test_a_record_that_is_no_text_is_named(tmp_path, line, message):
    path = write_jsonl(tmp_path / "x.jsonl", {"text": "a"}, line)
    assert path.read_bytes().startswith(b'{"text": "a"}\n')
    with pytest.raises(ValueError, match=message) as error:
        list(read_documents(path, field="text"))
    assert str(path) in str(error.value)


def test_an_offset_counts_blank_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n  \n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match="byte 0xff at offset 28, line 4"):
        list(read_documents(path, field="text"))


def test_a_text_file_that_is_not_utf8_is_named_with_its_place(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"one\ntwo\xe9\n")
    with pytest.raises(ValueError, match=r"x\.txt is not UTF-8: byte 0xe9 at offset 7, line 2"):
        list(read_documents(tmp_path / "x.txt", field="text"))


def test_a_folder_is_searched_to_the_bottom_in_sorted_order(tmp_path):
    names = ["b.txt", "a/z.jsonl", "a/b/c.bin", "a/b/c.idx", "README.md", "c.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    found = [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path)]
    assert found == ["a/b/c.bin", "a/z.jsonl", "b.txt", "c.jsonl"]


def test_the_packages_own_text_is_found_wherever_the_package_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (sample.TRAIN, Path(sample.VALID)):
        (file,) = find_files(path)
        documents = list(read_documents(file, field="text"))
        assert all(len(document.text) > 50_000 for document in documents)
        assert sum(len(document.text.encode()) for document in documents) < 300_000
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(r["license"] == "public domain" and r["year"] < 1875 for r in records)
    with pytest.raises(FileNotFoundError, match=r"data/sample/nowhere\.txt"):
        find_files("package:sample/nowhere.txt")


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no file or folder .*nowhere\.txt"):
        find_files(tmp_path / "nowhere.txt")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ValueError, match=r"x\.csv is not a \.jsonl, \.txt, \.bin file"):
        find_files(tmp_path / "x.csv")


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.jsonl, \.txt, \.bin file"):
        find_files(tmp_path)


def test_a_text_beside_its_own_tokens_is_not_read_twice(tmp_path):
    for name in ("x.jsonl", "x.bin", "x.idx"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"x\.jsonl and .*x\.bin, which reads as the same text"):
        find_files(tmp_path)


@pytest.mark.parametrize("suffix", [".txt", ".TXT", ".jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    text = "sp\u00e4ter"
    content = json.dumps({"text": text}) if suffix == ".jsonl" else text
    path.write_text(content, encoding="utf-8-sig")
    assert [document.text for document in read_documents(path, field="text")] == [text]


def test_a_folder_says_what_it_does_not_read_and_why(tmp_path, caplog):
    names = ("a.txt", "b.jsonl.gz", "c.parquet", "d.TXT", "e.bin", "e.idx", "e.json", "f.md")
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / "books.txt").mkdir()
    (tmp_path / "books.txt" / "inside.txt").write_text("")
    found = [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path)]
    assert found == ["a.txt", "books.txt/inside.txt", "d.TXT", "e.bin"]
    (line,) = (record.message for record in caplog.records)
    assert "4 files are read" in line
    for part in ("b.jsonl.gz' (training reads it as it is)", "c.parquet' (training", "f.md'"):
        assert part in line
    assert "e.idx" not in line


@pytest.mark.parametrize("name", ["._a.txt", ".ipynb_checkpoints/a.txt", ".cache/x/b.jsonl"])
def test_a_hidden_text_is_refused_by_name(tmp_path, name):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("other")
    with pytest.raises(ValueError, match=f"{name} is hidden"):
        find_files(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_git_lfs_pointer_is_refused_by_name(tmp_path, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.*git lfs pull"):
        list(read_documents(tmp_path / name, field="text"))
