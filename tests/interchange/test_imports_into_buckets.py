"""Runs that `fwpkm import` makes in buckets: used by their address, from any machine."""

import json
import tempfile

import numpy as np
import pytest

from fwpkm_jax.cli import main
from fwpkm_jax.config import read_experiment
from fwpkm_jax.data.tokenizers import load_tokenizer
from fwpkm_jax.run import load_run, text_tokenizer
from fwpkm_jax.storage.stores import Store
from tests.interchange.test_hub_to_hub import tiny_qwen  # noqa: F401
from tests.paper.test_release_layouts import CONFIG, TENSORS, one_safetensors
from tests.training.runs.stores import KINDS, a_store

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def on_another_machine(tmp_path, monkeypatch, name):
    """Temporary files lie elsewhere, and those before are gone."""
    assert list(tmp_path.glob("machine-*/fwpkm-*")) == []
    place = tmp_path / f"machine-{name}"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))


@pytest.mark.thorough("s3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_a_bucket_brings_its_tokenizer(kind, tiny_qwen, tmp_path, monkeypatch):  # noqa: F811
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    with a_store(kind, monkeypatch) as address:
        on_another_machine(tmp_path, monkeypatch, "first")
        assert main(["import", "hf", str(tiny_qwen), address]) == 0
        on_another_machine(tmp_path, monkeypatch, "second")
        stored = json.loads(Store(address).read("config.json"))
        assert stored["run_dir"] == address
        assert stored["data"]["tokenizer"] == f"{address}/hf/tokenizer.json"
        run = load_run(address)
        assert np.asarray(run.params["embedding"][...]).shape == (300, 16)
        there, here = text_tokenizer(run), load_tokenizer(str(tiny_qwen / "tokenizer.json"))
        assert there.fingerprint == here.fingerprint
        messages = [{"role": "user", "content": "a"}]
        assert there.has_chat_template
        assert there.write_chat(messages) == here.write_chat(messages) == "a<end>"
        assert "lock" not in Store(address).sizes()
        Store(address).remove("hf/tokenizer.json")
        with pytest.raises(ValueError, match=f"{address}/hf/tokenizer.json is named as the token"):
            text_tokenizer(run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_run_in_a_bucket_is_used_by_its_address(
    kind,
    tiny_qwen,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    pytest.importorskip("tokenizers")
    with a_store(kind, monkeypatch) as address:
        for number, command in enumerate(
            (
                ["import", "hf", str(tiny_qwen), address],
                ["eval", address, "--suite", "ppl", "--ppl.max_tokens", "20"],
                ["generate", address, "--prompt", "Ann", "--max_new_tokens", "3"],
                ["train", "--resume", address, "--training.steps", "1"],
                ["export", "hf", address, str(tmp_path / "exported")],
            )
        ):
            on_another_machine(tmp_path, monkeypatch, number)
            assert main(command) == 0, capsys.readouterr().err
        assert load_run(address).step == 1
        assert (tmp_path / "exported" / "tokenizer.json").exists()
        capsys.readouterr()
        assert main(["import", "hf", str(tiny_qwen), address]) == 2
        assert f"{address} is not empty; choose another" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_the_release_becomes_a_run_in_a_bucket(kind, tmp_path, monkeypatch):
    folder = tmp_path / "release"
    folder.mkdir()
    one_safetensors(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with a_store(kind, monkeypatch) as address:
        assert main(["import", "release", str(folder), address]) == 0
        run = load_run(address)
        expected = TENSORS["model.embed_tokens.weight"]
        np.testing.assert_array_equal(run.params["embedding"][...], expected)
        assert read_experiment(address).run_dir == address
        assert "release/config.json" in Store(address).sizes()
