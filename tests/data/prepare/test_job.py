import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fwpkm_jax.data import TokenFile
from fwpkm_jax.data.prepare import job, prepare, text_files
from fwpkm_jax.data.streams import formats
from fwpkm_jax.io.status_line import StatusLine
from fwpkm_jax.storage.lock import Lock
from tests.data.plain_writer import cut_rows, write_token_file

EOS = 256
ROW = 4097


class Stopped(BaseException):
    """Stands for a killed process: nothing of the program handles it."""


@pytest.fixture
def texts(tmp_path):
    """Two files of 30 documents in all, of 0 to 2,900 letters."""
    folder = tmp_path / "texts"
    folder.mkdir()
    documents = [chr(97 + n % 26) * (100 * (n % 30)) for n in range(30)]
    for name, part in (("a.jsonl", documents[:17]), ("b.jsonl", documents[17:])):
        records = [json.dumps({"text": text}) for text in part]
        (folder / name).write_text("\n\n".join(records))  # Every second line is blank.
    return folder


def tokens_of(folder):
    for file in sorted(folder.glob("*.jsonl")):
        for line in filter(None, file.read_text().splitlines()):
            if text := json.loads(line)["text"]:
                yield np.asarray([*text.encode(), EOS], np.int32)


def run(folder, out, *, source=None, **arguments):
    arguments = {"tokenizer": "bytes", "layout": "l4096", "save_seconds": 0, **arguments}
    arguments.setdefault("status", StatusLine(io.StringIO()))
    return prepare(source or text_files(folder), out=out, **arguments)


def contents(out):
    return [out.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx", ".json")]


@pytest.fixture
def whole(texts, tmp_path):
    """What an unbroken run leaves, by layout."""
    files = {}
    for layout in ("l4096", "stream"):
        run(texts, tmp_path / layout / "x.bin", layout=layout)
        files[layout] = contents(tmp_path / layout / "x.bin")
    return files


@pytest.mark.parametrize("layout", ["l4096", "stream"])
@pytest.mark.parametrize("cap", [None, 1, 4097, 4098, 20_000])
def test_the_files_are_those_of_the_plain_writer(texts, tmp_path, layout, cap):
    documents = tokens_of(texts)
    entries = documents if layout == "stream" else cut_rows(documents, row_length=ROW)
    tokens = write_token_file(tmp_path / "y.bin", entries, vocab_size=257, max_tokens=cap)
    manifest = run(texts, tmp_path / "x.bin", layout=layout, max_tokens=cap)
    assert contents(tmp_path / "x.bin")[:2] == [
        (tmp_path / name).read_bytes() for name in ("y.bin", "y.idx")
    ]
    assert manifest["written"]["tokens"] == tokens
    assert not list(tmp_path.glob("*partial*")) + list(tmp_path.glob("*.lock"))


def test_characters_are_counted_up_to_the_document_that_reaches_the_cap(texts, tmp_path):
    # 100 + 200 + 300 + 400 letters, and an end each.
    for cap, documents in ((599, 3), (600, 3), (601, 4)):
        out = tmp_path / f"{cap}.bin"
        manifest = run(texts, out, layout="stream", max_characters=cap)
        assert TokenFile(out, vocab_size=257).num_entries == documents
        assert manifest["read"]["characters"] == 100 * documents * (documents + 1) // 2


def test_the_manifest_says_what_the_files_hold_and_what_they_are_made_of(texts, tmp_path):
    out = tmp_path / "x.bin"
    manifest = run(texts, out, max_tokens=10**6)
    assert json.loads(out.with_suffix(".json").read_text()) == manifest
    for files, folder in ((manifest["outputs"], tmp_path), (manifest["inputs"], texts)):
        assert len(files) == 2
        for name, checksum in files.items():
            content = (folder / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            assert checksum == {"bytes": len(content), "sha256": digest}
    tokens = sum(map(len, tokens_of(texts)))
    assert manifest["read"] == {"documents": 29, "characters": tokens - 29, "tokens": tokens}
    assert manifest["written"] == {"entries": tokens // ROW, "tokens": tokens // ROW * ROW}
    expected = {"source": "text", "field": "text", "layout": "l4096", "max_tokens": 10**6}
    assert expected.items() <= manifest["job"].items()
    assert manifest["job"]["tokenizer_fingerprint"] == "bytes"


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    layout=st.sampled_from(["l4096", "stream"]),
    stops=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    batch=st.sampled_from([1, 2, 7]),
    save_seconds=st.sampled_from([0, 1e9]),
)
def test_stopped_anywhere_and_called_again_it_leaves_the_same_files(
    tmp_path_factory, layout, stops, batch, save_seconds
):
    root = tmp_path_factory.mktemp("stopped")
    (folder := root / "texts").mkdir()
    records = [{"text": chr(97 + n) * (500 * (n % 5))} for n in range(20)]
    (folder / "a.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    (folder / "b.txt").write_text("z" * 999)
    run(folder, root / "whole" / "x.bin", layout=layout)
    out = root / "x.bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_BETWEEN", batch)
        patch.setattr(formats, "_PIECE_BYTES", 300)  # Also between two parts of a document.
        for stop in stops:
            with pytest.MonkeyPatch.context() as fault, contextlib.suppress(Stopped):
                _stop_at(fault, stop)
                run(folder, out, layout=layout, save_seconds=save_seconds)
        run(folder, out, layout=layout)
    assert contents(out) == contents(root / "whole" / "x.bin")


def _stop_at(fault, stop):
    """Stops before or after the `stop`-th of all steps that touch a file, named or not."""
    steps = itertools.count(1)

    def stepping(function):
        def wrapped(*arguments, **keywords):
            if next(steps) == stop:
                raise Stopped
            result = function(*arguments, **keywords)
            if next(steps) == stop:
                raise Stopped
            return result

        return wrapped

    for owner, name in (
        (job.TokenOutput, "add"),
        (job.TokenOutput, "sync"),
        (job, "write_json"),
        (job, "publish"),
    ):
        fault.setattr(owner, name, stepping(getattr(owner, name)))


@pytest.mark.parametrize("done", ["x.bin", "x.idx", "x.json"])
def test_stopped_while_the_files_are_named_it_leaves_the_same_files(
    texts, whole, tmp_path, monkeypatch, done
):
    out = tmp_path / "x.bin"
    replace = type(out).replace

    def replace_and_stop(path, target):
        replace(path, target)
        if target.name == done:
            raise Stopped

    monkeypatch.setattr(type(out), "replace", replace_and_stop)
    with pytest.raises(Stopped):
        run(texts, out)
    assert (tmp_path / done).exists()
    monkeypatch.undo()
    run(texts, out)
    assert contents(out) == whole["l4096"]


def test_bytes_after_the_last_point_are_cut_off(texts, whole, tmp_path, monkeypatch):
    out = tmp_path / "x.bin"
    monkeypatch.setattr(job, "_BETWEEN", 5)
    saves = itertools.count()
    write_json = job.write_json

    def write_json_twice(path, value):
        write_json(path, value)
        if next(saves) == 2:
            raise Stopped

    monkeypatch.setattr(job, "write_json", write_json_twice)
    with pytest.raises(Stopped):
        run(texts, out)
    monkeypatch.setattr(job, "write_json", write_json)
    for name in ("x.bin.partial", "x.idx.partial"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"torn")
    run(texts, out)
    assert contents(out) == whole["l4096"]


def test_a_complete_file_is_checked_and_left_alone(texts, whole, tmp_path):
    out = tmp_path / "l4096" / "x.bin"
    before = out.stat().st_mtime_ns
    run(texts, out)
    assert (contents(out), out.stat().st_mtime_ns) == (whole["l4096"], before)
    content = bytearray(out.read_bytes())
    content[5] ^= 1
    out.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.bin is not the file its manifest x\.json describes"):
        run(texts, out)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layout": "stream"}, "its layout is 'l4096', not 'stream'"),
        ({"max_tokens": 5}, "its max_tokens is None, not 5"),
        ({"tokenizer": "mistral-v1"}, "its tokenizer is 'bytes', not 'mistral-v1'"),
    ],
)
def test_files_of_another_command_are_refused(texts, whole, tmp_path, other, message):
    with pytest.raises(ValueError, match=message):
        run(texts, tmp_path / "l4096" / "x.bin", **other)


def stop_in_the_middle(texts, out, monkeypatch):
    write_json, saves = job.write_json, itertools.count()

    def write_and_stop(path, value):
        write_json(path, value)
        if next(saves) == 2:  # The first is the beginning, the second after one document.
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(job, "_BETWEEN", 12)
        patch.setattr(job, "write_json", write_and_stop)
        with pytest.raises(Stopped):
            run(texts, out)


def test_a_text_that_changes_in_between_is_refused(texts, tmp_path, monkeypatch):
    stop_in_the_middle(texts, tmp_path / "x.bin", monkeypatch)
    (texts / "a.jsonl").write_text('{"text": "another"}')
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since the preparation began"):
        run(texts, tmp_path / "x.bin")


def test_a_text_of_equal_length_and_time_is_known_by_its_content(texts, tmp_path, monkeypatch):
    file, out = texts / "a.jsonl", tmp_path / "x.bin"

    def replaced():
        before = file.stat()
        file.write_bytes(file.read_bytes().swapcase())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    stop_in_the_middle(texts, out, monkeypatch)
    replaced()
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since the preparation began"):
        run(texts, out)
    replaced()
    run(texts, out)
    replaced()
    with pytest.raises(ValueError, match=r"a\.jsonl has changed since .*x\.bin was made of it"):
        run(texts, out)


def test_a_text_that_is_only_touched_is_not(texts, whole, tmp_path, monkeypatch):
    stop_in_the_middle(texts, tmp_path / "x.bin", monkeypatch)
    (texts / "a.jsonl").write_bytes((texts / "a.jsonl").read_bytes())
    run(texts, tmp_path / "x.bin")
    assert contents(tmp_path / "x.bin") == whole["l4096"]


def test_partial_files_that_lost_bytes_are_refused(texts, tmp_path, monkeypatch):
    stop_in_the_middle(texts, tmp_path / "x.bin", monkeypatch)
    (tmp_path / "x.idx.partial").write_bytes(b"")
    with pytest.raises(ValueError, match=r"x\.idx\.partial holds 0 bytes, fewer than the \d+"):
        run(texts, tmp_path / "x.bin")


def test_two_processes_do_not_write_the_same_file(texts, tmp_path):
    out = tmp_path / "x.bin"
    lock = Lock(tmp_path, name="x.bin.lock")
    with pytest.raises(ValueError, match=r"x\.bin is in use by process .*; .*another output"):
        run(texts, out)
    lock.release()
    run(texts, out)


def test_too_little_text_leaves_nothing(tmp_path):
    (tmp_path / "x.txt").write_text("ab")
    out = tmp_path / "out" / "x.bin"
    with pytest.raises(ValueError, match="less than one entry"):
        run(tmp_path / "x.txt", out)
    assert not list(out.parent.iterdir())
    assert run(tmp_path / "x.txt", out, layout="stream")["written"]["tokens"] == 3


@pytest.mark.parametrize("layout", ["l4096", "stream"])
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_memory_holds_a_batch_not_the_text(tmp_path, monkeypatch, kind, layout):
    line = "x" * 20_000
    text = tmp_path / f"x.{kind}"
    text.write_text(f"{json.dumps({'text': line})}\n" * 100 if kind == "jsonl" else line * 100)
    monkeypatch.setattr(formats, "_TOGETHER_CHARACTERS", 40_000)
    monkeypatch.setattr(formats, "_PIECE_BYTES", 40_000)
    run(text, tmp_path / "first.bin", max_tokens=1)  # Imports and caches.
    tracemalloc.start()
    run(text, tmp_path / "x.bin", layout=layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tokens = 100 * 20_001 if kind == "jsonl" else 2_000_001
    entries = tokens // ROW if layout == "l4096" else {"jsonl": 100, "txt": 1}[kind]
    assert TokenFile(tmp_path / "x.bin", vocab_size=257).num_entries == entries
    assert peak < 2**20  # The text has two million letters, four bytes each as tokens.


@pytest.mark.parametrize("layout", ["l4096", "stream"])
def test_a_document_in_pieces_gives_the_files_of_the_whole(tmp_path, monkeypatch, layout):
    text = "aä€😀" * 3000  # Of one to four bytes, so that pieces end within a character.
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(formats, "_PIECE_BYTES", 1001)
    document = np.asarray([*text.encode(), EOS], np.int32)
    for cap in (None, 4097, 40_000):
        documents = [document, document]
        entries = documents if layout == "stream" else cut_rows(documents, row_length=ROW)
        write_token_file(tmp_path / "y.bin", entries, vocab_size=257, max_tokens=cap)
        out = tmp_path / f"{cap}.bin"
        read = run(tmp_path / "texts", out, layout=layout, max_tokens=cap)["read"]
        assert contents(out)[:2] == [(tmp_path / x).read_bytes() for x in ("y.bin", "y.idx")]
        # Rows end a text where the cap is reached; an entry of a document is whole.
        whole = layout == "stream" or cap is None
        assert read["documents"] == (1 if cap == 4097 else 2)
        assert (read["tokens"] == read["documents"] * len(document)) == whole


def test_threads_change_nothing_but_the_time(texts, tmp_path):
    for threads in (1, 3):
        run(texts, tmp_path / f"{threads}.bin", tokenizer="mistral-v1", num_threads=threads)
    assert contents(tmp_path / "1.bin")[:2] == contents(tmp_path / "3.bin")[:2]


def test_progress_is_a_line_now_and_then(texts, tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(job, "_SHOW_SECONDS", {False: 0.0})
    run(texts, tmp_path / "x.bin", max_tokens=40_000, status=StatusLine(stream))
    first, *_, last = stream.getvalue().splitlines()
    assert re.fullmatch(r"text 1/2 a\.jsonl  1 documents  101 of 40,000 tokens  .* tokens/s", first)
    assert last.endswith("x.bin: 10 entries, 40,970 tokens")
