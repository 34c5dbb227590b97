import hashlib
import importlib.resources
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fwpkm_jax.data.tokenizers import ByteTokenizer, load_tokenizer

TEXTS = ["plain", "", " leading and trailing ", "späte 語 \U0001f600", "a\x00b\r\n\t", "x </s> <s>"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    """A small model trained here, with the paper's choices: bytes for the unknown, no trimming."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "jumps over the lazy dog 0123456789"] * 20),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture
def mistral():
    pytest.importorskip("mistral_common", reason="the extra [tokenizers] is not installed")
    return load_tokenizer("mistral-v1")


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_bytes_of_utf8(text):
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_every_byte_and_the_end_are_an_id_of_their_own():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([104, 256, 105, 256]) == "hi"
    assert tokenizer.decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("text", TEXTS)
def test_any_sentencepiece_model_reads_back_what_it_encodes(model_path, text):
    tokenizer = load_tokenizer(str(model_path))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert not {1, 2} & set(ids.tolist())  # Neither start nor end, even where the text spells them.


def test_a_model_is_told_apart_by_its_bytes(model_path):
    tokenizer = load_tokenizer(str(model_path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (320, 2)
    assert tokenizer.fingerprint == hashlib.sha256(model_path.read_bytes()).hexdigest()


def test_the_papers_tokenizer_has_its_table_of_facts(mistral):
    assert (mistral.vocab_size, mistral.eos_id) == (32_000, 2)
    assert mistral.fingerprint.startswith("dadfd56d7667")
    _, lone_space, *digits = mistral.encode("x 123456").tolist()
    assert [mistral.decode([digit]) for digit in digits] == list("123456")
    assert mistral.encode("x123456").tolist()[1:] == digits
    assert mistral.encode("x ").tolist()[1:] == [lone_space]


def test_a_prompt_that_ends_in_a_space_keeps_it_as_a_token(mistral):
    prompt = mistral.encode("The secret number for ID-ab3f is ").tolist()
    answered = mistral.encode("The secret number for ID-ab3f is 042").tolist()
    assert answered[: len(prompt)] == prompt
    assert mistral.decode([415, *answered[len(prompt) :]]) == "The042"


@pytest.mark.parametrize("text", TEXTS)
def test_the_papers_tokenizer_never_writes_a_control_piece(mistral, text):
    ids = mistral.encode(text)
    assert not {0, 1, 2} & set(ids.tolist())
    assert mistral.decode(ids) == text
    assert mistral.decode([*ids, mistral.eos_id]) == text


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_batch_is_encoded_as_its_texts_are(mistral, num_threads):
    for tokenizer in (ByteTokenizer(), mistral):
        batch = tokenizer.encode_batch([*TEXTS, ""], num_threads=num_threads)
        assert [ids.dtype.name for ids in batch] == ["int32"] * len(batch)
        expected = [tokenizer.encode(text).tolist() for text in [*TEXTS, ""]]
        assert [ids.tolist() for ids in batch] == expected


def test_without_its_package_the_papers_tokenizer_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[tokenizers\]'"):
        load_tokenizer("mistral-v1")


def test_another_file_in_the_papers_place_is_refused(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer.model.v1").write_bytes(b"abc")
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"has SHA-256 ba7816bf.*, not dadfd56d"):
        load_tokenizer("mistral-v1")
