"""Text that is read while training: kinds of files, mixtures, positions, and what is refused."""

import gzip
import io
import itertools
import json

import fsspec
import numpy as np
import pytest

from fwpkm_jax.data import TextData, load_tokenizer, make_dataset, stream_documents
from fwpkm_jax.data.streams import formats, tables
from fwpkm_jax.data.streams.files import data_files
from tests.data.plain_writer import write_token_file
from tests.faults.remote_places import Bucket

EOS = 256
TEXTS = [f"{number} " + "äbc"[number % 3] * (number * 7 % 50) for number in range(150)]
LINES = "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in TEXTS)
TOKENS = [token for text in TEXTS for token in (*text.encode(), EOS)]


def parquet_bytes(texts, **columns):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    parquet.write_table(arrow.table({"text": texts, **columns}), buffer, row_group_size=40)
    return buffer.getvalue()


def arrow_bytes(texts, kind="stream"):
    arrow = pytest.importorskip("pyarrow")
    buffer, table = io.BytesIO(), arrow.table({"n": list(range(len(texts))), "text": texts})
    new = arrow.ipc.new_stream if kind == "stream" else arrow.ipc.new_file
    with new(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=33)
    return buffer.getvalue()


def write_tokens(path):
    entries = [np.asarray([*text.encode(), EOS]) for text in TEXTS]
    write_token_file(path, entries, vocab_size=257)


MAKE = {
    "x.jsonl": lambda path: path.write_text(LINES),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "x.parquet": lambda path: path.write_bytes(parquet_bytes(TEXTS)),
    "x.arrow": lambda path: path.write_bytes(arrow_bytes(TEXTS)),
    "file.arrow": lambda path: path.write_bytes(arrow_bytes(TEXTS, "file")),
    "x.bin": write_tokens,
}


@pytest.fixture(params=MAKE)
def file(request, tmp_path):
    path = tmp_path / request.param
    MAKE[request.param](path)
    return path


def config_of(*paths, **fields):
    fields = {"length": 9, "reading": "stream", "window": 1, **fields}
    return TextData(train_paths=tuple(map(str, paths)), **fields)


def batches_of(config, **arguments):
    arguments = {"split": "train", "batch_size": 2, "seed": 0, **arguments}
    return iter(make_dataset(config, **arguments))


def tokens_of(batches, number):
    return np.concatenate([next(batches)["tokens"].ravel() for _ in range(number)]).tolist()


def test_every_kind_of_file_gives_the_tokens_of_its_texts_epoch_after_epoch(file):
    rows = tokens_of(batches_of(config_of(file)), 300)
    assert rows == list(itertools.islice(itertools.cycle(TOKENS), 6000))


def test_reading_can_start_again_at_every_piece(file, monkeypatch):
    monkeypatch.setattr(formats, "_PIECE_TOKENS", 7)
    (data,) = data_files(file)
    tokenizer = load_tokenizer("bytes")
    pieces = list(formats.read_tokens(data, tokenizer, field="text"))
    assert len(pieces) >= len(TEXTS)
    for number in range(0, len(pieces), 13):
        rest = formats.read_tokens(data, tokenizer, field="text", start=pieces[number].place)
        for actual, expected in zip(rest, pieces[number : number + 40], strict=False):
            assert (actual.place, actual.id) == (expected.place, expected.id)
            np.testing.assert_array_equal(actual.tokens, expected.tokens)


def test_memory_and_stream_read_the_same_validation_rows(file):
    rows = {}
    for reading in ("memory", "stream"):
        config = config_of(file, valid_paths=(str(file),), reading=reading)
        rows[reading] = list(batches_of(config, split="valid", batch_size=64))
    for actual, expected in zip(rows["stream"], rows["memory"], strict=True):
        assert actual.keys() == expected.keys()
        for name in actual:
            np.testing.assert_array_equal(actual[name], expected[name])


def test_documents_are_kept_apart_as_in_rows_from_memory(tmp_path):
    MAKE["x.jsonl"](tmp_path / "x.jsonl")
    paths = (str(tmp_path / "x.jsonl"),)
    for packing in ("concat", "documents"):
        first, second = (
            next(
                batches_of(
                    config_of(*paths, valid_paths=paths, packing=packing, reading=reading),
                    split="valid",
                    batch_size=50,
                )
            )
            for reading in ("memory", "stream")
        )
        assert ("segment_ids" in first) == (packing == "documents")
        for name in first:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("text", ["", "\ufeff", "a", "ä" * 99, "\ufeffab€" * 40])
def test_a_long_text_is_read_in_pieces_without_cutting_characters(tmp_path, monkeypatch, text):
    (tmp_path / "x.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(formats, "_PIECE_BYTES", 16)
    (data,) = data_files(tmp_path / "x.txt")
    tokenizer = load_tokenizer("bytes")
    pieces = list(formats.read_tokens(data, tokenizer, field="text"))
    plain = text.removeprefix("\ufeff")
    expected = [*plain.encode(), EOS] if plain else []
    assert [token for piece in pieces for token in piece.tokens.tolist()] == expected
    for piece in pieces[1:]:
        rest = formats.read_tokens(data, tokenizer, field="text", start=piece.place)
        whole = [token for piece in rest for token in piece.tokens.tolist()]
        assert whole == expected[-len(whole) :]


@pytest.fixture
def three(tmp_path):
    """A source of three files and one of a Parquet file; every row tells where it is from."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(3):
        lines = "".join(json.dumps({"text": f"{number}" * 60}) + "\n" for _ in range(40))
        (folder / f"{number}.jsonl").write_text(lines)
    (tmp_path / "p.parquet").write_bytes(parquet_bytes(["p" * 90] * 70))
    return folder, tmp_path / "p.parquet"


@pytest.mark.by_default("concat-7", thorough=["concat-1"])
@pytest.mark.parametrize("steps", [1, 7, 40])
@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_restored_position_gives_what_would_have_come(three, steps, packing):
    config = config_of(*three, train_weights=(3, 1), window=16, packing=packing)
    whole = batches_of(config, batch_size=4)
    for _ in range(steps):
        next(whole)
    state = json.loads(json.dumps(whole.get_state()))
    assert len(json.dumps({n: x for n, x in state.items() if n != "source"})) < 1000
    expected = [next(whole) for _ in range(20)]
    # The same by one process, and by two that have half of each batch.
    for kept in (None, (0, 1), (2, 3)):
        again = batches_of(config, batch_size=4, rows=kept)
        again.set_state(state)
        for batch in expected:
            actual = next(again)
            for name in batch:
                part = batch[name] if kept is None else batch[name][list(kept)]
                np.testing.assert_array_equal(actual[name], part)
        assert again.get_state() == whole.get_state()
        again.close()


@pytest.mark.thorough
def test_a_mixture_has_the_weights_and_follows_the_seed(three):
    def drawn(seed):
        batches = batches_of(config_of(*three, train_weights=(3, 1), window=64), seed=seed)
        return [
            bytes(np.concatenate([next(batches)["tokens"] for _ in range(64)]).astype(np.uint8))
            for _ in range(2)
        ]

    rows = b"".join(drawn(0))
    from_parquet = sum(b"p" in rows[at : at + 10] for at in range(0, len(rows), 10))
    assert from_parquet == 64  # A quarter of 256.
    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


def test_each_epoch_reads_every_row_in_an_order_of_files_of_its_own(three):
    batches = batches_of(config_of(three[0], window=1), batch_size=1)
    epoch = 3 * 40 * 61
    tokens = tokens_of(batches, 6 * epoch // 10)
    epochs = [tuple(tokens[at : at + epoch]) for at in range(0, len(tokens) - epoch + 1, epoch)]
    assert len(epochs) == 6
    assert len(set(map(lambda x: tuple(sorted(x)), epochs))) == 1
    assert len(set(epochs)) > 2


def test_rows_are_shuffled_within_their_window(three):
    plain = batches_of(config_of(three[1], window=1), batch_size=32)
    shuffled = batches_of(config_of(three[1], window=32), batch_size=32)
    for _ in range(5):
        first, second = next(plain)["tokens"].tolist(), next(shuffled)["tokens"].tolist()
        assert sorted(first) == sorted(second)


def change(path, name):
    path = path / name
    path.write_bytes(path.read_bytes()[:-9] + b'other"}' + b"\n\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("many/1.jsonl", "train text: 1.jsonl has other content"),
        ("valid.jsonl", "valid text: valid.jsonl has other content"),
    ],
)
def test_other_text_is_refused_by_name(three, tmp_path, name, message):
    (tmp_path / "valid.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n")
    config = config_of(three[0], valid_paths=(str(tmp_path / "valid.jsonl"),))
    batches = batches_of(config)
    next(batches)
    state = batches.get_state()
    batches_of(config).set_state(state)
    change(tmp_path, name)
    with pytest.raises(ValueError, match=message):
        batches_of(config).set_state(state)


@pytest.mark.parametrize("state", [{}, {"next_index": 3}, None, {"stream": {"a": 1}, "source": {}}])
def test_a_position_of_other_data_is_refused(three, state):
    with pytest.raises(ValueError, match=r"is not a position|text has changed"):
        batches_of(config_of(three[0])).set_state(state)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "good"}\n{"text": 5}\n', "line 2: field 'text' is a int"),
        ("x.jsonl", b'{"text": "good"}\n{"other": "x"}\n', "line 2 has no field 'text'"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "good"}\n' * 9)[:-9], "line 10"),
        ("x.jsonl.gz", b"not compressed", r"x\.jsonl\.gz, line 1 "),
        ("x.txt", b"ab\xffcd", "not UTF-8: byte 0xff at offset 2"),
        ("x.txt", b"ab\xc3", "not UTF-8: byte 0xc3 at offset 2"),
        ("x.jsonl", b"\n\n", "holds 0 tokens, less than one row of length"),
        ("x.parquet", b"PAR1 and no more", r"x\.parquet is damaged"),
        ("x.arrow", b"ARROW1 and no more", r"x\.arrow is damaged"),
        ("x.arrow", b"", r"x\.arrow is damaged"),
    ],
    ids=range(10),
)
def test_damaged_text_is_an_error_that_names_the_place(tmp_path, name, content, message):
    if not name.startswith(("x.j", "x.t")):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        tokens_of(batches_of(config_of(tmp_path / name)), 30)
    assert str(error.value).count("\n") == 0
    assert name in str(error.value)


def test_columns_are_checked(tmp_path):
    (tmp_path / "x.parquet").write_bytes(parquet_bytes([1, 2], body=["a", "b"]))
    with pytest.raises(ValueError, match=r"x\.parquet has a field 'text' of type int64"):
        next(batches_of(config_of(tmp_path / "x.parquet")))
    with pytest.raises(ValueError, match=r"no field 'content', only 'text', 'body'"):
        next(batches_of(config_of(tmp_path / "x.parquet", field="content")))
    rows = tokens_of(batches_of(config_of(tmp_path / "x.parquet", field="body", length=3)), 2)
    assert rows[:4] == [97, EOS, 98, EOS]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_that_hold_much_more_than_their_size_are_refused(tmp_path, monkeypatch, kind):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, table = tmp_path / f"x.{kind}", arrow.table({"text": ["a" * 2000] * 100})
    if kind == "parquet":
        options = {"use_dictionary": False, "write_statistics": False}
        parquet.write_table(table, path, compression="zstd", **options)
    else:
        options = arrow.ipc.IpcWriteOptions(compression="zstd")
        with arrow.ipc.new_stream(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
    expected = tokens_of(batches_of(config_of(path)), 3)
    assert expected == [97] * len(expected)
    monkeypatch.setattr(tables, "_MOST_DECODED_BYTES", 100_000)
    with pytest.raises(ValueError, match=rf"x\.{kind} is damaged .*unpacks? to 20\d,\d+"):
        next(batches_of(config_of(path)))
    monkeypatch.undo()
    monkeypatch.setattr(tables, "MOST_TEXT_BYTES", 1999)
    with pytest.raises(ValueError, match="row 1 has a text of 2,000 characters, and at most 1,999"):
        next(batches_of(config_of(path)))


def test_a_value_that_many_rows_share_is_in_memory_once(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shared = arrow.DictionaryArray.from_arrays(arrow.array([0] * 64, "int32"), ["a" * 2**20])
    parquet.write_table(arrow.table({"text": shared}), tmp_path / "x.parquet", store_schema=False)
    (file,) = data_files(tmp_path / "x.parquet")
    first, batch = next(tables.read_batches(file, ["text"]))
    assert (first, batch.num_rows) == (0, 64)
    assert batch.nbytes < 2**21


def test_a_folder_of_save_to_disk_is_read_as_it_says(tmp_path):
    """As `datasets` 4 writes it: shards in stream format, named in order by `state.json`."""
    folder = tmp_path / "saved"
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (folder / names[0]).write_bytes(arrow_bytes(TEXTS[:60]))
    (folder / names[1]).write_bytes(arrow_bytes(TEXTS[60:]))
    (folder / "cache-0123456789abcdef.arrow").write_bytes(arrow_bytes(["no"] * 9))
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    config = config_of(folder, valid_paths=(str(folder),))
    tokens = [t for doc in stream_documents(config, "valid") for t in doc.tokens.tolist()]
    assert tokens == TOKENS


def test_lines_of_an_object_are_read_through_what_clients_of_buckets_open(tmp_path, monkeypatch):
    monkeypatch.setattr("fwpkm_jax.storage.addresses._file_system", lambda scheme: Bucket())
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "b.parquet").write_bytes(parquet_bytes(TEXTS))
    config = config_of("none", valid_paths=(f"memory://{tmp_path}",))
    tokens = [t for doc in stream_documents(config, "valid") for t in doc.tokens.tolist()]
    assert tokens == TOKENS * 2


@pytest.mark.thorough
def test_buckets_are_read_by_address_folder_and_pattern(tmp_path):
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/text/a.jsonl.gz", gzip.compress(LINES.encode()))
    store.pipe("/bucket/text/b.parquet", parquet_bytes(TEXTS))
    store.pipe("/bucket/text/README.md", b"no")
    try:
        for path, times in [("text", 2), ("text/*.parquet", 1), ("text/a.jsonl.gz", 1)]:
            config = config_of("none", valid_paths=(f"memory://bucket/{path}",))
            tokens = [t for doc in stream_documents(config, "valid") for t in doc.tokens.tolist()]
            assert tokens == TOKENS * times
        batches = batches_of(config_of("memory://bucket/text", window=8))
        next(batches)
        state = json.loads(json.dumps(batches.get_state()))
        expected = tokens_of(batches, 50)
        again = batches_of(config_of("memory://bucket/text", window=8))
        again.set_state(state)
        assert tokens_of(again, 50) == expected
        store.pipe("/bucket/text/b.parquet", parquet_bytes(TEXTS[::-1]))
        with pytest.raises(ValueError, match=r"b\.parquet has other content"):
            batches_of(config_of("memory://bucket/text", window=8)).set_state(state)
        with pytest.raises(FileNotFoundError, match="no object or folder memory://bucket/none"):
            batches_of(config_of("memory://bucket/none"))
    finally:
        store.rm("/bucket", recursive=True)
