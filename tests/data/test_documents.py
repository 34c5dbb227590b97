"""Which files of a folder are read, the same for every place, and what their documents are."""

import json
import logging
from pathlib import Path

import fsspec
import pytest

from fwpkm_jax.data import TextData, load_tokenizer, sample, stream_documents
from fwpkm_jax.data.streams.files import data_files
from fwpkm_jax.data.streams.formats import read_text

DISK, BUCKET = "disk", "bucket"
PLACES = pytest.mark.parametrize("place", [DISK, BUCKET])
LINE = '{"text": "a"}\n'


@pytest.fixture
def put(tmp_path):
    """Writes files by name below a folder of a place; returns the folder's path or address."""
    store = fsspec.filesystem("memory")

    def write(place, files):
        for name, content in files.items():
            content = content if isinstance(content, bytes) else content.encode()
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
            if place == BUCKET:
                store.pipe(f"/chosen/{name}", content)
        return str(tmp_path) if place == DISK else "memory://chosen"

    yield write
    if store.exists("/chosen"):
        store.rm("/chosen", recursive=True)


def below(path):
    root = path.removeprefix("memory:/")
    return [x.name.partition(root)[2].lstrip("/") for x in data_files(path)]


def documents(path, field="text"):
    config = TextData(train_paths=(str(path),), field=field)
    decode = load_tokenizer("bytes").decode
    return [(one.id, decode(one.tokens)) for one in stream_documents(config, "train")]


def write_jsonl(path, *records):
    lines = (x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in records)
    path.write_bytes(b"".join(lines))
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
    expected = [("first", "one\ntwo"), ("x.jsonl:3", "später"), ("0", "</s> ")]
    assert documents(path) == expected


def test_the_field_can_be_chosen(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", {"text": "no", "content": "yes"})
    assert documents(path, field="content") == [("x.jsonl:1", "yes")]


def test_a_text_file_is_one_document_to_the_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(b" a\r\nb\x00\n")
    assert documents(tmp_path / "x.txt") == [("x.txt", " a\r\nb\x00\n")]
    assert read_text(tmp_path / "x.txt") == " a\r\nb\x00\n"
    (tmp_path / "x.txt").write_bytes(b"")
    assert documents(tmp_path / "x.txt") == []


@pytest.mark.parametrize("suffix", [".txt", ".TXT", ".jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    content = json.dumps({"text": "später"}) if suffix == ".jsonl" else "später"
    path.write_text(content, encoding="utf-8-sig")
    assert [text for _, text in documents(path)] == ["später"]


def test_the_packages_own_text_is_found_wherever_the_package_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (sample.TRAIN, Path(sample.VALID)):
        (file,) = data_files(path)
        assert all(len(text) > 50_000 for _, text in documents(path))
        assert file.size < 300_000
        records = [json.loads(line) for line in file.path.read_text().splitlines()]
        assert all(r["license"] == "public domain" and r["year"] < 1875 for r in records)


@PLACES
def test_a_folder_is_searched_to_the_bottom_in_sorted_order(put, place, caplog):
    empty = ["b.txt", "a/z.jsonl", "a/b/c.bin", "a/b/c.idx", "a/b/c.json", "d.TXT", "c.jsonl"]
    empty += ["books.txt/inside.txt"]
    others = ["README.md", "e.jsonl.zst", "f.jsonl.zst", ".gitattributes"]
    path = put(place, {**dict.fromkeys(empty, ""), **dict.fromkeys(others, "")})
    with caplog.at_level(logging.WARNING):
        found = below(path)
    assert found == [
        *("a/b/c.bin", "a/z.jsonl", "b.txt", "books.txt/inside.txt", "c.jsonl", "d.TXT"),
    ]
    (line,) = (record.message for record in caplog.records)
    assert "6 files are read" in line
    assert "as no text that is read: 'README.md', 'e.jsonl.zst', 'f.jsonl.zst'." in line
    assert "c.idx" not in line


@PLACES
def test_a_pattern_names_files(put, place):
    path = put(place, {"a/train-0.jsonl": LINE, "a/train-1.jsonl": LINE, "a/test-0.jsonl": LINE})
    assert [x.short_name for x in data_files(f"{path}/a/train-*")] == [
        "train-0.jsonl",
        "train-1.jsonl",
    ]


@PLACES
def test_titles_with_such_words_are_no_splits(put, place):
    titles = ["a_slow_train", "the.test", "one", "two", "three"]
    path = put(place, {f"{title}.txt": "" for title in titles})
    assert len(below(path)) == 5


SAVED = json.dumps({"_data_files": [{"filename": "data-0.arrow"}]})
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


@PLACES
def test_caches_beside_a_saved_data_set_are_not_read(put, place):
    files = {"data-0.arrow": "", "cache-0123.arrow": "", "old.arrow": "", "dataset_info.json": "{}"}
    path = put(place, {**files, "state.json": SAVED})
    assert below(path) == ["data-0.arrow"]


@PLACES
@pytest.mark.parametrize(
    ("files", "words"),
    {
        "hidden": (["a.txt", "._a.txt"], r"\._a\.txt is hidden"),
        "editor's": (["a.txt", ".ipynb_checkpoints/a.txt"], r"a\.txt is hidden"),
        "twice": (["x.jsonl", "x.bin", "x.idx"], r"x\.jsonl and x\.bin, which reads as the same"),
        "packed too": (["x.jsonl", "x.jsonl.gz"], r"x\.jsonl and x\.jsonl\.gz, which reads"),
        "no text": (["a.md"], r"holds no \.jsonl, .* only 'a\.md'; unpack what"),
        "splits": (
            ["train-0.jsonl", "test-0.jsonl"],
            r"several splits, as 'test-0.*'train-0.*; name one, as .*/train\*\.",
        ),
        "saved splits": (
            {"dataset_dict.json": '{"splits": ["train", "test"]}', "train/a.arrow": ""},
            r"holds the splits train, test .* one, as .*/train\.",
        ),
        "a lost part": ({"state.json": SAVED, "x.arrow": ""}, r"state\.json names data-0\.arrow, "),
    }.values(),
)
def test_a_folder_that_would_be_read_wrongly_is_refused(put, place, files, words):
    path = put(place, files if isinstance(files, dict) else dict.fromkeys(files, ""))
    with pytest.raises(ValueError, match=words):
        data_files(path)


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    {
        "field": (
            "x.jsonl",
            b'{"body": "y"}',
            ValueError,
            r"line 2 has no field 'text', only 'b",
        ),
        "empty": ("x.jsonl", b"{}", ValueError, "line 2 has no field 'text', only none"),
        "number": ("x.jsonl", b'{"text": 5}', ValueError, "line 2: field 'text' is a int"),
        "list": ("x.jsonl", b'["text"]', ValueError, r'line 2 is \["text"\]; a JSON object is exp'),
        "cut": ("x.jsonl", b'{"text": "x"', ValueError, r"line 2 is damaged \(Expecting .*repair"),
        "bytes": ("x.jsonl", b'{"text": "\xff"}', ValueError, "line 2 is not UTF-8"),
        "half": ("x.jsonl", b'{"text": "\\ud800"}', ValueError, "line 2 is damaged .*surrogates"),
        "latin": ("x.txt", b"two\xe9\n", ValueError, "not UTF-8: byte 0xe9 at offset 17, line 2"),
        "pointer": ("a.jsonl", LFS, ValueError, r"a\.jsonl is a git-lfs pointer.*git lfs pull"),
        "of a text": ("a.txt", LFS, ValueError, r"a\.txt is a git-lfs pointer.*git lfs pull"),
        "of rows": ("a.parquet", LFS, ValueError, r"a\.parquet is a git-lfs pointer"),
        "kind": (
            "x.csv",
            b"a",
            ValueError,
            r"x\.csv is not a \.jsonl, .* file; rename",
        ),
        "absent": (None, b"", FileNotFoundError, "There is no file or folder .*nowhere"),
        "package": (None, b"p", FileNotFoundError, r"data/sample/nowhere\.txt"),
    }.values(),
)
def test_a_file_that_is_no_text_is_named_in_one_line(tmp_path, name, content, error, words):
    path = tmp_path / (name or "nowhere.txt")
    if name:
        content = content.encode() if isinstance(content, str) else LINE.encode() + content
        path.write_bytes(content)
    if content == b"p":
        path = "package:sample/nowhere.txt"
    with pytest.raises(error, match=words) as found:
        documents(path)
    assert str(path).rpartition("/")[2] in str(found.value)
    assert "\n" not in str(found.value)


def test_a_tokenised_file_that_is_not_there_is_answered_by_the_command_that_writes_it(tmp_path):
    for name in ("none.bin", "x.bin"):
        (tmp_path / "x.bin").write_bytes(b"")  # Without its index.
        with pytest.raises(FileNotFoundError, match=r"`python -m fwpkm_jax\.data\.prepare`"):
            documents(tmp_path / name)
