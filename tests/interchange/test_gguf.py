"""A model in one GGUF file is the one that the transformers library reads from it."""

import contextlib
import random
import re

import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.interchange.gguf import GGUFFile, import_gguf
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.run.load import load_run
from tests.interchange.gguf_writer import CONFIG, TEMPLATE, tensors_of, write_gguf

pytestmark = pytest.mark.extras
TEXT = "hello world, 1234 hellos!\n\n  <|im_end|> über 😀"


@pytest.fixture(scope="module", autouse=True)
def _installed():
    pytest.importorskip("gguf", reason="gguf is not installed")


def error_of(path, **fields) -> str:
    write_gguf(path, fields.pop("architecture", "llama"), tensors_of("llama"), **fields)
    with pytest.raises(OutsideFileError) as error:
        GGUFFile(path).write_small_files(path.parent)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_comes_back_under_its_name(tmp_path, family, tied):
    tensors = tensors_of(family, tied=tied)
    write_gguf(tmp_path / "model.gguf", family, tensors)
    found = GGUFFile(tmp_path / "model.gguf")
    assert {*found} == {*tensors}
    assert found.config["tie_word_embeddings"] is tied
    for name, array in tensors.items():
        np.testing.assert_array_equal(found.read(name), array, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_and_tokens_are_those_of_the_transformers_library(tmp_path, family, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_gguf(tmp_path / "model.gguf", family, tensors_of(family))
    run = load_run(import_gguf(tmp_path / "model.gguf", tmp_path / "run"))
    ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (2, 40))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    ours = np.asarray(run.model.logits(run.model.hidden(jnp.asarray(ids), {}).x))
    assert np.max(np.abs(ours - expected)) < 1e-5 * np.max(np.abs(expected))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    kept = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "run" / "hf" / "tokenizer.json")
    )
    text = TEXT.replace("1234", "")  # The library forgets that digits are tokens of their own.
    assert kept.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert (tmp_path / "run" / "hf" / "chat_template.jinja").read_text() == TEMPLATE


def test_quantised_tensors_are_what_the_package_expands(tmp_path):
    gguf = pytest.importorskip("gguf")
    array = np.tile(tensors_of("llama")["model.embed_tokens.weight"], (1, 2))
    write_gguf(
        tmp_path / "m.gguf", "llama", {"model.embed_tokens.weight": array}, quantised="Q8_0",
        embedding_length=32,
    )  # fmt: skip
    found = GGUFFile(tmp_path / "m.gguf").read("model.embed_tokens.weight")
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    np.testing.assert_array_equal(found, expected)
    assert np.max(np.abs(found - array)) < 0.02 * np.max(np.abs(array))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'; GGUF files of llama, qwen2"),
        ({"tokenizer": "t5"}, "tokenizer.ggml.model is 't5' with 'smollm', which is not known"),
        ({"pre": "tekken"}, "tokenizer.ggml.model is 'gpt2' with 'tekken', which is not known"),
        ({"end": 9999}, "tokenizer.ggml.eos_token_id gives a document's end the id 9999 of 270"),
        ({"attention.head_count": 0}, "num_attention_heads=0 must be an integer from 1"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, fields, said):
    assert said in error_of(tmp_path / "model.gguf", **fields)


def test_damaged_files_are_refused_in_one_line(tmp_path):
    path, rng = tmp_path / "model.gguf", random.Random(0)
    write_gguf(path, "llama", tensors_of("llama"))
    whole = path.read_bytes()
    for _ in range(60):
        content = bytearray(whole[: rng.choice((len(whole), rng.randrange(len(whole))))])
        for _ in range(rng.choice((1, 4))):
            if content:
                content[rng.randrange(min(len(content), 8000))] = rng.randrange(256)
        path.write_bytes(content)
        with contextlib.suppress(OutsideFileError):  # Whose message is always one line.
            opened = GGUFFile(path)
            opened.write_small_files(tmp_path)
            for name in opened:
                opened.read(name)


def test_the_command_imports_a_file(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf", "llama", tensors_of("llama"))
    assert main(["import", "gguf", str(tmp_path / "model.gguf"), str(tmp_path / "run")]) == 0
    assert re.search(r"wrote .*run", capsys.readouterr().out)
    assert (tmp_path / "run" / "config.json").is_file()
