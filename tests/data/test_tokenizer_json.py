"""A `tokenizer.json` and the chat template beside it."""

import json

import numpy as np
import pytest

from fwpkm_jax.data.tokenizer_json import encode_line, encode_message
from fwpkm_jax.data.tokenizers import ByteTokenizer, load_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TEMPLATE = (
    "{%- for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def path(tmp_path):
    """A byte-level tokenizer with three control tokens, which end a text in two ways."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat and the hat and the bat"] * 4, trainer)
    names = ("<|text|>", "<|start|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    values = {"eos_token": {"content": "<|text|>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    ids = [tokenizer.token_to_id(name) for name in ("<|end|>", "<|text|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return path


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
    ids = encode_message(tokenizer, "the cat")
    assert tokenizer.decode(ids) == "user\nthe catassistant\n"
    start, end = (tokenizer.vocab_size - n for n in (2, 1))
    assert [i for i in ids.tolist() if i in (start, end)] == [start, end, start]
    with pytest.raises(ValueError, match=r"holds the control token '<\|end\|>'"):
        encode_message(tokenizer, "a<|end|>b")
    with pytest.raises(ValueError, match="A ByteTokenizer has no chat template"):
        encode_message(ByteTokenizer(), "a")
    np.testing.assert_array_equal(encode_line(tokenizer, "the cat"), ids)
    assert encode_line(ByteTokenizer(), "a").tolist() == list(b"a\n")
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|text|>"}')
    plain = load_tokenizer(str(path))
    assert plain.decode(encode_line(plain, "the cat")) == "the cat\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "chat template of"),
        (None, "has no chat template"),
    ],
)
def test_a_template_sees_nothing_but_the_conversation(path, template, message):
    values = {"eos_token": "<|text|>", "chat_template": template}
    path.with_name("tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        encode_message(load_tokenizer(str(path)), "a")


def test_a_file_that_is_none_or_has_no_end_is_refused(path):
    path.with_name("tokenizer_config.json").unlink()
    path.with_name("generation_config.json").unlink()
    with pytest.raises(ValueError, match="names the token that ends a document"):
        load_tokenizer(str(path))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        load_tokenizer(str(path))
