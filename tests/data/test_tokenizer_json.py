"""A `tokenizer.json` and the chat template beside it."""

import json

import numpy as np
import pytest

from fwpkm_jax.data.chat_turns import has_template, message_tokens
from fwpkm_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from fwpkm_jax.io.untrusted import OutsideFileError
from tests.data.chat_tokenizer import save_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture
def path(tmp_path):
    return save_tokenizer(tmp_path)


def test_text_comes_back_and_never_ends_its_document(path):
    tokenizer = load_tokenizer(str(path))
    text = "the hat <|text|> ünd\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)
    assert not set(tokenizer.stop_ids) & set(ids.tolist())
    np.testing.assert_array_equal(tokenizer.encode_batch([text], num_threads=1)[0], ids)
    assert tokenizer.eos_id == tokenizer.stop_ids[0] != tokenizer.stop_ids[1]
    assert tokenizer.vocab_size == max(tokenizer.stop_ids) + 1
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    with pytest.raises(ValueError, match="is not one of the"):
        tokenizer.decode([tokenizer.vocab_size])


def test_a_template_puts_a_message_into_its_form(path):
    tokenizer = load_tokenizer(str(path))
    ids = message_tokens(tokenizer, "the cat")
    assert tokenizer.decode(ids) == "user\nthe catassistant\n"
    start, end = (tokenizer.vocab_size - n for n in (2, 1))
    assert [i for i in ids.tolist() if i in (start, end)] == [start, end, start]
    with pytest.raises(ValueError, match=r"holds the control token '<\|end\|>'"):
        message_tokens(tokenizer, "a<|end|>b")
    with pytest.raises(ValueError, match="A ByteTokenizer has no chat template"):
        message_tokens(ByteTokenizer(), "a")
    assert has_template(tokenizer)
    assert not has_template(ByteTokenizer())
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|text|>"}')
    assert not has_template(load_tokenizer(str(path)))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "chat template cannot be filled in"),
        (None, "has no chat template"),
    ],
)
def test_a_template_sees_nothing_but_the_conversation(path, template, message):
    values = {"eos_token": "<|text|>", "chat_template": template}
    path.with_name("tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        message_tokens(load_tokenizer(str(path)), "a")


def test_a_file_that_is_none_or_has_no_end_is_refused(path):
    path.with_name("tokenizer_config.json").unlink()
    path.with_name("generation_config.json").unlink()
    with pytest.raises(ValueError, match="names the token that ends a document"):
        load_tokenizer(str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load_tokenizer(str(path))


def changed(path, **model):
    """The file with other settings of its model; a value of None is left out."""
    content = json.loads(path.read_text())
    content["model"] = {n: x for n, x in (content["model"] | model).items() if x is not None}
    path.write_text(json.dumps(content))
    return str(path)


def test_ids_that_no_array_of_tokens_holds_are_refused(path):
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    name = changed(path, vocab=vocabulary | {"the": 2**31})
    with pytest.raises(OutsideFileError, match=r"token 'the' has the id 2,147,483,648; ids are be"):
        load_tokenizer(name)


def test_an_end_of_documents_that_is_no_token_is_refused(path):
    path.with_name("tokenizer_config.json").unlink()
    path.with_name("generation_config.json").write_text(json.dumps({"eos_token_id": 10**6}))
    with pytest.raises(OutsideFileError, match=r"a document's end the id 1,000,000 of \d+"):
        load_tokenizer(str(path))


def test_a_text_that_a_tokenizer_has_no_token_for_is_one_line(path):
    vocabulary = {"the": 0, "end": 1}
    content = json.loads(path.read_text()) | {"added_tokens": [], "pre_tokenizer": None}
    content["model"] = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    path.write_text(json.dumps(content))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": "end"}))
    path.with_name("generation_config.json").unlink()
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("the").tolist() == [0]
    for encode in (tokenizer.encode, lambda x: tokenizer.encode_batch([x], num_threads=1)):
        with pytest.raises(OutsideFileError, match=r"cannot encode this text .*UNK.*; use another"):
            encode("hat")


@pytest.mark.parametrize(
    "left",
    [
        {
            "truncation": {
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
        {
            "padding": {
                **{"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None},
                **{"pad_id": 0, "pad_type_id": 0, "pad_token": "t"},
            }
        },
        {
            "padding": {
                **{"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 8},
                **{"pad_id": 0, "pad_type_id": 0, "pad_token": "t"},
            }
        },
        {"dropout": 0.5},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|text|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {
                    "<|text|>": {"id": "<|text|>", "ids": [1], "tokens": ["<|text|>"]}
                },
            }
        },
    ],
    ids=["truncation", "fixed_padding", "longest_padding", "dropout", "post_processor"],
)
def test_what_a_fine_tuning_script_left_in_the_file_changes_no_token(path, left):
    texts = ["the cat sat on the mat and the hat", "the"]
    clean = load_tokenizer(str(path))
    expected = [clean.encode(text) for text in texts]
    written = clean.encode_written("<|user|>the cat")
    content = json.loads(path.read_bytes())
    if "dropout" in left:
        content["model"]["dropout"] = left["dropout"]
    else:
        content |= left
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(path))
    for _ in range(3):  # Dropout would draw.
        for ids, of_batch, text in zip(
            expected, tokenizer.encode_batch(texts, num_threads=1), texts, strict=True
        ):
            np.testing.assert_array_equal(tokenizer.encode(text), ids)
            np.testing.assert_array_equal(of_batch, ids)
        np.testing.assert_array_equal(tokenizer.encode_written("<|user|>the cat"), written)
