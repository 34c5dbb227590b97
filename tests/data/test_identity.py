"""Text is known by its content: a run is resumed with the text it was made of, or refused."""

import json

import numpy as np
import pytest

from fwpkm_jax.data import TextData, identity, make_dataset
from fwpkm_jax.data.streams import files
from fwpkm_jax.data.token_files import TokenFile
from fwpkm_jax.data.tokenizers import ByteTokenizer
from tests.data.plain_writer import write_token_file


def batches(folder, **options):
    valid = (str(folder / "valid.txt"),) if (folder / "valid.txt").exists() else ()
    options = {"train_paths": (str(folder / "train"),), "valid_paths": valid, "length": 8} | options
    return iter(make_dataset(TextData(**options), split="train", batch_size=2, seed=0))


@pytest.fixture
def folder(tmp_path):
    """A training text of a `.txt`, a `.jsonl` and a `.bin`, and a validation text."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_text("the first of two texts of one length")
    (tmp_path / "train" / "b.txt").write_text("and the other of the two of a length")
    (tmp_path / "train" / "c.jsonl").write_text(json.dumps({"text": "a record of its own"}))
    ids = ByteTokenizer().encode("tokens of a file that was prepared before")
    write_token_file(tmp_path / "train" / "d.bin", [ids], vocab_size=257)
    (tmp_path / "valid.txt").write_text("what the model is validated with, a text of its own")
    return tmp_path


def state_of(folder):
    iterator = batches(folder)
    next(iterator)
    return json.loads(json.dumps(iterator.get_state()))


def test_the_same_text_goes_on_also_under_other_names_and_elsewhere(folder):
    state = state_of(folder)
    expected = next(batches_at(folder, state))["tokens"]
    (folder / "train" / "a.txt").rename(folder / "train" / "0.txt")
    folder = folder.rename(folder.with_name("moved"))
    np.testing.assert_array_equal(next(batches_at(folder, state))["tokens"], expected)


def batches_at(folder, state):
    iterator = batches(folder)
    iterator.set_state(state)
    return iterator


def swap(folder):
    a, b = folder / "train" / "a.txt", folder / "train" / "b.txt"
    texts = a.read_text(), b.read_text()
    a.write_text(texts[1])
    b.write_text(texts[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: (folder / "train" / "b.txt").write_text("x" * 36),
            "train text: b.txt has other content",
        ),
        (swap, "train text: a.txt has other content"),
        (
            lambda folder: (folder / "train" / "c.jsonl").write_text(
                json.dumps({"text": "a record of its OWN"})
            ),
            "train text: c.jsonl has other content",
        ),
        (
            lambda folder: (folder / "train" / "d.bin").write_bytes(
                (folder / "train" / "d.bin").read_bytes()[::-1].replace(bytes([0]), bytes([0]))[1:]
                + bytes([0])
            ),
            "train text: d.bin has other content",
        ),
        (
            lambda folder: (folder / "valid.txt").write_text(
                "what the model is validated with, a text of its OWN"
            ),
            "valid text: valid.txt has other content",
        ),
    ],
    ids=["letters", "swapped", "record", "tokens", "validation"],
)
def test_other_text_of_equal_length_is_refused_by_name(folder, change, message):
    state = state_of(folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        batches_at(folder, state)


def test_a_large_file_is_known_by_blocks_all_over_it(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE", 1000)
    monkeypatch.setattr(identity, "BLOCKS", 10)
    monkeypatch.setattr(identity, "BLOCK", 50)
    content = bytearray(np.random.default_rng(0).bytes(2000))
    (tmp_path / "a.txt").write_bytes(content)
    before = identity.identity(tmp_path / "a.txt")
    for place in (0, 1999, 216 + 20):
        other = bytearray(content)
        other[place] ^= 1
        (tmp_path / "a.txt").write_bytes(other)
        assert identity.identity(tmp_path / "a.txt") != before


def test_many_files_have_one_identity_together(folder, monkeypatch):
    monkeypatch.setattr(files, "MOST_NAMED", 2)
    state = state_of(folder)
    (one,) = state["source"]["files"]["train"][0]
    assert one[0].startswith("4 files from ")
    (folder / "train" / "b.txt").write_text("x" * 36)
    with pytest.raises(ValueError, match=r"4 files from .* has other content"):
        batches_at(folder, state)


def test_the_tokenised_file_of_the_fixture_is_whole(folder):
    assert len(TokenFile(folder / "train" / "d.bin", vocab_size=257)) == 41
