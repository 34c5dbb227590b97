"""Refusals of the room of data that one call shows: the call, and the words of its one line."""

import numpy as np
import pytest

from fwpkm_jax.data import RecallData, TextData, TokenFile, load_tokenizer, make_dataset
from fwpkm_jax.data import stream_documents as documents
from fwpkm_jax.data.prepare import prepare, select, text_files
from fwpkm_jax.data.tokenizers import ByteTokenizer
from tests.data.plain_writer import write_token_file

NAN = float("nan")


def text(**fields):
    return TextData(**{"train_paths": ("x.txt",), **fields})


def stream(**fields):
    return text(reading="stream", **fields)


def batches(config=None, **arguments):
    config = config or RecallData(length=64, num_facts=4, min_distance=16)
    return iter(make_dataset(config, **{"split": "train", "batch_size": 2, "seed": 0, **arguments}))


def rows(at, **fields):
    return next(batches(text(train_paths=(str(at),), length=3, **fields)))


def tokens(at, entries=((0, 1, 2),), vocab_size=65_536, index=None):
    write_token_file(at / "x.bin", [np.asarray(x) for x in entries], vocab_size=vocab_size)
    if index is not None:
        (at / "x.idx").write_text(index)
    return TokenFile(at / "x.bin", vocab_size=min(vocab_size, 65_536))


def prepared(at, out="out.bin", **arguments):
    (at / "a.txt").write_text("ab")
    arguments = {"tokenizer": "bytes", "layout": "stream", **arguments}
    return prepare(text_files(at / "a.txt"), out=at / out, **arguments)


def written(at, name, content):
    (at / name).write_text(content)
    return at / name


TABLE = {
    # Configurations.
    "no path": (lambda at: text(train_paths=()), r"train_paths=\(\) names no text"),
    "length": (lambda at: text(length=0), "length=0 is too small; use 1 or more"),
    "shares": (lambda at: text(train_weights=(1.0, 2.0)), r"\(1\.0, 2\.0\) has 2 entries for 1"),
    "no share": (lambda at: text(train_weights=(0.0,)), r"train_weights=\(0\.0,\) must be pos"),
    "NaN": (lambda at: text(train_weights=(NAN,)), r"train_weights=\(nan,\) must be positive"),
    "best fit": (lambda at: stream(packing="best_fit"), "needs the lengths of all documents"),
    "window": (lambda at: stream(window=0), "window=0 is too small"),
    "ftp": (lambda at: stream(train_paths=("ftp://a/b",)), "train_paths='ftp://a/b' is an address"),
    "hub": (lambda at: stream(train_paths=("hf://squad",)), "='hf://squad' is no data set of the"),
    "slash": (lambda at: stream(train_paths=("gs:/b/c",)), "train_paths='gs:/b/c' is an address"),
    "keys": (lambda at: RecallData(num_keys=15), "num_keys=15 cannot give num_facts=16 distinct"),
    "questions": (lambda at: RecallData(num_questions=17), "num_questions=17 is not between 1 and"),
    "none": (lambda at: RecallData(num_questions=0), "num_questions=0 is not between"),
    "facts": (lambda at: RecallData(num_facts=0), "num_facts=0 is too small; use 1"),
    "distance": (lambda at: RecallData(min_distance=1), "min_distance=1 is too small; use 2"),
    "weight": (lambda at: RecallData(other_loss_weight=-0.5), "other_loss_weight=-0.5 is too sm"),
    "no number": (lambda at: RecallData(other_loss_weight=NAN), "other_loss_weight=nan"),
    "recall": (lambda at: RecallData(length=156), "length=156 cannot hold .* raise length to 157"),
    # Batches.
    "batch": (lambda at: batches(batch_size=0), "batch_size=0 must be 1 or more"),
    "rows": (lambda at: batches(rows=(1, 2)), r"rows=\(1, 2\) must be some of the rows 0 to 1"),
    "negative": (lambda at: batches(rows=(-1, 1)), r"rows=\(-1, 1\) must be"),
    "order": (lambda at: batches(rows=(1, 0)), r"rows=\(1, 0\) must be"),
    "no row": (lambda at: batches(rows=()), r"rows=\(\) must be"),
    "split": (lambda at: batches(split="test"), "split='test' is neither"),
    "short": (
        lambda at: rows(written(at, "x.txt", "ab")),
        r"x\.txt holds 3 tokens, less than one row of .* = 4",
    ),
    "empty": (lambda at: rows(written(at, "x.jsonl", "")), r"x\.jsonl holds 0 tokens"),
    "validation": (lambda at: documents(text(), "valid"), r"valid_paths=\(\) names no text"),
    "its rows": (lambda at: batches(text(), split="valid"), r"valid_paths=\(\) names no text"),
    # Tokenised files.
    "id": (lambda at: tokens(at, [[0], [3, 7, 9]], 5), "Entry 1 holds the id 7, outside .* of 5"),
    "negative id": (lambda at: tokens(at, [[-1]], 5), "Entry 0 holds the id -1"),
    "wide": (lambda at: tokens(at, [[1]], 2**31 + 1), "2147483649 exceeds the 2147483648 ids of"),
    "size": (lambda at: tokens(at, index="2 0\n"), "holds 6 bytes, but the 1 entries of x.idx n"),
    "end": (
        lambda at: tokens(at, index="2 0\n2 4\n"),
        "line 2 has 2 tokens at byte 4: .* at byte 4, and x.bin at 6",
    ),
    "gap": (
        lambda at: tokens(at, index="2 0\n1 2\n"),
        "line 2 has 1 tokens at byte 2: the last entry ends at byte 4",
    ),
    "blank line": (lambda at: tokens(at, index="2 0\n\n1 4\n"), "line 2 is b'', not `length off"),
    "word": (lambda at: tokens(at, index="2 0\nthree 4\n"), "line 2 is b'three 4"),
    "digits": (lambda at: tokens(at, index="0_3 0\n"), "line 1 is b'0_3 0"),
    "sign": (lambda at: tokens(at, index="-1 0\n"), "line 1 is b'-1 0"),
    # Tokenizers.
    "near": (
        lambda at: load_tokenizer("byte"),
        "tokenizer='byte' is neither.*nearest name is bytes",
    ),
    "absent": (lambda at: load_tokenizer("no.model"), "is neither.*SentencePiece .model file"),
    "model": (
        lambda at: load_tokenizer(str(written(at, "x.model", "not a model"))),
        r"x\.model is not a SentencePiece model",
    ),
    "above": (lambda at: ByteTokenizer().decode([104, 257]), "token id 257 is not one of the 257"),
    "below": (lambda at: ByteTokenizer().decode([104, -1]), "token id -1 is not one of the 257"),
    # Preparation.
    "range": (lambda at: select([], start=2, stop=2), "start=2 and stop=2 leave no record"),
    "past the end": (
        lambda at: text_files(written(at, "a.txt", "ab"), start=1),
        "The parts hold 1 records, none from number 1 on",
    ),
    "limit": (lambda at: prepared(at, max_tokens=0), "max_tokens=0 must be 1 or more"),
    "characters": (lambda at: prepared(at, max_characters=-1), "max_characters=-1 must be 1 or m"),
    "name": (lambda at: prepared(at, out="x.idx"), r"x\.idx must end in \.bin"),
    "too little": (lambda at: prepared(at, layout="l4096"), "gave 1 documents with 3 tokens, less"),
    "origin": (
        lambda at: prepared(written(at, "out.idx", "mine").parent),
        r"out\.idx exists without a manifest",
    ),
    "state": (
        lambda at: prepared(written(at, "out.partial.json", "{").parent),
        r"out\.partial\.json is damaged",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_it_is_refused_in_one_line(tmp_path, name):
    call, words = TABLE[name]
    with pytest.raises(ValueError, match=words) as error:
        call(tmp_path)
    assert str(error.value).partition("\n---")[0].count("\n") == 0
