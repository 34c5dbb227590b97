"""Chat templates, which are programs from elsewhere, are filled in by Jinja's sandbox."""

import json

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from fwpkm_jax.data import load_tokenizer
from fwpkm_jax.data.chat_template import TemplateFailedError, render
from fwpkm_jax.io.untrusted import OutsideFileError
from tests.data.chat_tokenizer import save_tokenizer

MESSAGES = {"messages": [{"role": "user", "content": "the cat"}]}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0] < 3 }}", "TypeError"),
        ("{{ 'a' * 2e9 }}", "TypeError"),
        ("{{ ('a' * 17000000) }}", "writes more than 16,777,216 characters"),
        ("{{ messages.x.y }}", "has no attribute 'x'|is undefined"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "calls itself too often"),
        ("{% if %}", "Expected an expression"),
        ("{{ " + "(" * 5000 + " }}", "calls itself too often|too many nested"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages|map('nosuch')|list }}", "No filter named"),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(template, said):
    with pytest.raises(TemplateFailedError, match=said):
        render(template, MESSAGES)
    assert render("{{ messages[0].content }}", MESSAGES) == "the cat"


def test_a_long_conversation_passes_whole():
    text = "ä\n" * 10**6
    assert render("{{ messages[0].content }}", {"messages": [{"content": text}]}) == text


def test_the_template_of_a_tokenizer_names_its_file(tmp_path):
    path = save_tokenizer(tmp_path, "{{ 1 / 0 }}")
    tokenizer = load_tokenizer(str(path))
    said = r"tokenizer_config\.json, chat template cannot be filled in: ZeroDivisionError.*--chat"
    with pytest.raises(OutsideFileError, match=said) as error:
        tokenizer.encode_chat(MESSAGES["messages"])
    assert "\n" not in str(error.value)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('a\x1b[31m\nb') }}")
    said = r"chat_template\.jinja, chat template cannot be filled in: a\\x1b\[31m b; leave"
    with pytest.raises(OutsideFileError, match=said):
        tokenizer.encode_chat(MESSAGES["messages"])
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(OutsideFileError, match=r"1,048,577 bytes, and at most 1,048,576"):
        tokenizer.encode_chat(MESSAGES["messages"])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(OutsideFileError, match="is not UTF-8"):
        tokenizer.encode_chat(MESSAGES["messages"])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is \[\]; a JSON object"),
        ("tokenizer_config.json", "[" * 10**5, "nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": 5}', r"eos_token is 5; a text is expected"),
        ("tokenizer_config.json", '{"eos_token": {"content": [1]}}', r"eos_token is \[1\]"),
        ("generation_config.json", '{"eos_token_id": "a"}', "eos_token_id is 'a'; ids of"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id is True; ids of"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id is -1; ids of"),
        ("generation_config.json", "null", "is null; a JSON object is expected"),
        ("tokenizer.json", "[" * 10**5, r"is no tokenizer\.json"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        ("tokenizer.json", "\ud800", r"is no tokenizer\.json"),
    ],
)
def test_files_of_a_tokenizer_that_lie_are_refused(tmp_path, name, content, said):
    path = save_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(OutsideFileError, match=said) as error:
        load_tokenizer(str(path))
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", [5, [1], [{"name": "default", "template": 5}], {"a": 1}])
def test_a_template_that_is_no_text_is_refused(tmp_path, template):
    path = save_tokenizer(tmp_path)
    values = {"eos_token": "<|text|>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"is no text|has no chat template"):
        load_tokenizer(str(path)).encode_chat(MESSAGES["messages"])
