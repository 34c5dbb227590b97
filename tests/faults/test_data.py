"""Data that is damaged, empty, too short, or not what it was."""

import dataclasses
import io
import json
import os
import re

import numpy as np
import pytest
import sentencepiece

from fwpkm_jax.data import (
    TextData,
    load_tokenizer,
    make_dataset,
    stream_documents,
)
from fwpkm_jax.run.train import train
from tests.data.plain_writer import write_token_file
from tests.training.tiny_config import get_config

LINE = "a line of the text that every test here is made of\n"


def batches(tmp_path, *, length=7, **fields):
    config = TextData(train_paths=(str(tmp_path),), length=length, **fields)
    return iter(make_dataset(config, split="train", batch_size=2, seed=0))


def sentence_pieces(path, text, *, vocab_size):
    """A small SentencePiece model, trained on a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, vocab_size=vocab_size,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


def read_an_epoch(iterator):
    """Reads every row of 2,000 tokens at least once."""
    for _ in range(125):
        next(iterator)


@pytest.mark.parametrize("kept", [0, 1, 999, 2001, 3998])
def test_a_tokenised_file_that_shrinks_is_named(fault, tmp_path, kept):
    path = tmp_path / "x.bin"
    write_token_file(path, [np.arange(2000) % 250], vocab_size=257)
    iterator = batches(tmp_path)
    next(iterator)
    os.truncate(path, kept)
    named = rf"{re.escape(str(path))} has lost its end .*put the file"
    with fault("a tokenised file shrinks"), pytest.raises(ValueError, match=named):
        read_an_epoch(iterator)


@pytest.mark.parametrize("place", [0, 700, 1999])
@pytest.mark.parametrize("token_id", [257, 65535])
def test_a_token_id_out_of_range_is_named(fault, tmp_path, place, token_id):
    tokens = np.arange(2000) % 250
    tokens[place] = token_id
    write_token_file(tmp_path / "x.bin", [tokens], vocab_size=65536)
    named = rf"holds the id {token_id} at token {place}, outside"
    with fault("a token id out of range"), pytest.raises(ValueError, match=named):
        read_an_epoch(batches(tmp_path))


NOT_UTF8 = {
    "a lone continuation": b"\x80",
    "a start without its rest": b"\xe2\x82 ",
    "cut off at the end": b"\xf0\x9f\x98",
    "overlong": b"\xc0\xaf",
    "half a surrogate pair": b"\xed\xa0\x80",
    "beyond the last character": b"\xf4\x90\x80\x80",
    "latin-1": "\u00e9t\u00e9".encode("latin-1"),
    "utf-16": "\ufeffab".encode("utf-16"),
}


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("kind", NOT_UTF8)
def test_bytes_that_are_not_utf8_are_named_with_their_place(fault, tmp_path, name, kind):
    path = tmp_path / name
    before = LINE.encode() if name == "x.txt" else (json.dumps({"text": LINE}) + "\n").encode()
    path.write_bytes(before + b'{"text": "' + NOT_UTF8[kind] + b'"}\n')
    with (
        fault("bytes that are not UTF-8"),
        pytest.raises(ValueError, match="is not UTF-8") as error,
    ):
        batches(tmp_path)
    assert str(path) in str(error.value)
    assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    "record",
    [
        "{", "[1]", "null", '"text"', '{"txt": "a"}', '{"text": 3}', '{"text": "\\ud800"}',
        "1" * 5000, "[" * 100_000, "\x00",
    ],
    ids=["cut", "list", "null", "string", "field", "number", "surrogate", "digits", "deep", "zero"],
)  # fmt: skip
def test_a_record_that_is_no_text_is_named(fault, tmp_path, record):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": LINE}) + "\n" + record + "\n")
    with fault("a record that is no text"), pytest.raises(ValueError, match="line 2"):
        list(stream_documents(TextData(train_paths=(str(path),)), "train"))


def test_empty_documents_change_nothing(fault, tmp_path):
    texts = [LINE * 2, LINE * 3]
    for name, documents in {"plain": texts, "holes": ["", texts[0], "", "", texts[1], ""]}.items():
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        blank = "\n \n" if name == "holes" else ""
        (tmp_path / name / "x.jsonl").write_text(blank + lines + blank)
    with fault("empty documents", 6):
        plain, holes = (batches(tmp_path / name) for name in ("plain", "holes"))
        for _ in range(20):
            np.testing.assert_array_equal(next(plain)["tokens"], next(holes)["tokens"])


@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_a_split_without_one_row_is_refused(fault, tmp_path, split, text):
    (tmp_path / "x.txt").write_text(text)
    paths = (str(tmp_path / "x.txt"),)
    data = TextData(train_paths=paths, valid_paths=paths, length=16)
    with (
        fault("a split without one row"),
        pytest.raises(ValueError, match=r"x\.txt holds \d tokens, less than one row"),
    ):
        make_dataset(data, split=split, batch_size=2, seed=0)


def test_a_run_without_validation_text_is_refused_before_it_begins(fault, tmp_path):
    (tmp_path / "x.txt").write_text(LINE * 20)
    tiny = get_config()
    experiment = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, vocab_size=257),
        data=TextData(train_paths=(str(tmp_path / "x.txt"),), length=16),
        run_dir=str(tmp_path / "run"),
    )
    with (
        fault("a split without one row"),
        pytest.raises(ValueError, match=r"valid_paths=\(\) names no text"),
    ):
        train(experiment, stream=io.StringIO())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rows_of_one_label_train(fault, tmp_path):
    (tmp_path / "x.txt").write_text(LINE * 20)
    tiny = get_config()
    paths = (str(tmp_path / "x.txt"),)
    experiment = dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, vocab_size=257),
        data=TextData(train_paths=paths, valid_paths=paths, length=1),
        training=dataclasses.replace(tiny.training, steps=3),
        run_dir=str(tmp_path / "run"),
    )
    with fault("rows of one label"):
        result = train(experiment, stream=io.StringIO())
        assert result.step == 3
        assert np.isfinite(result.results["loss"])


def test_another_text_or_tokenizer_than_was_saved_is_refused(fault, tmp_path):
    (tmp_path / "text").mkdir()
    text = "".join(f"{LINE} and its number is {index}\n" for index in range(40))
    (tmp_path / "text" / "x.txt").write_text(text)
    model = sentence_pieces(tmp_path / "m.model", text, vocab_size=60)
    whole = model.read_bytes()
    iterator = batches(tmp_path / "text", tokenizer=str(model))
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["source"]["tokenizer"] == load_tokenizer(str(model)).fingerprint
    follows = next(iterator)["tokens"]

    sentence_pieces(model, text[: len(text) // 2], vocab_size=50)
    with (
        fault("another tokenizer under the old name"),
        pytest.raises(ValueError, match="tokenizer: "),
    ):
        batches(tmp_path / "text", tokenizer=str(model)).set_state(state)
    model.write_bytes(whole)
    (tmp_path / "text" / "x.txt").write_text(text + LINE)
    with (
        fault("a text that grew since it was saved"),
        pytest.raises(ValueError, match=r"tokens: .*x.txt has other content"),
    ):
        batches(tmp_path / "text", tokenizer=str(model)).set_state(state)
    (tmp_path / "text" / "x.txt").write_text(text)
    resumed = batches(tmp_path / "text", tokenizer=str(model))
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed)["tokens"], follows)
