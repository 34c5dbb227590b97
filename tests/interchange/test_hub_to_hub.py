"""The commands of docs/tutorials/hub_to_hub.md: a small hub, a bucket in memory, a tiny model."""

import json
import re
import shlex
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from fwpkm_jax.cli import program
from fwpkm_jax.interchange.hf import model_config
from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.layout import parts
from tests.evaluation.harness.parity import write_tasks
from tests.interchange.small_hub import TOKEN, a_small_hub
from tests.interchange.test_hf_commands import save_tokenizer
from tests.training.runs.stores import a_store

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "hub_to_hub.md"
QWEN = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
SMALLER = {
    "--add_memory": [
        "--model.fast_weight.rule.num_subkeys", "8", "--model.fast_weight.chunk_size", "8"
    ],
    "--data.length": ["16"], "--training.batch_size": ["2"], "--training.steps": ["2"],
    "--ppl.max_tokens": ["20"], "--max_new_tokens": ["3"],
    "--lm_eval.tasks": ["tiny_choice", "--lm_eval.include_path", "tasks", "--limit", "2"],
}  # fmt: skip
"""Values of the page's options for the model above."""
# The client passes an open file by the old name of httpx's argument.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def commands() -> list[list[str]]:
    """The page's commands, with names of the small hub and smaller values."""
    text = PAGE.read_text(encoding="utf-8").replace("s3://BUCKET", "memory://bucket")
    text = text.replace("OWNER/NAME", "me/memory").replace("\\\n", "")
    found, used = [], set()
    for line in "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines():
        words, skip = [], False
        for word in shlex.split(line):
            if word.startswith("--"):
                skip = word in SMALLER
                words += [word, *SMALLER[word]] if skip else [word]
                used |= {word} & SMALLER.keys()
            elif not skip:
                words.append(word)
        found.append(words)
    assert used == SMALLER.keys()
    return found


@pytest.fixture
def tiny_qwen(tmp_path):
    """A folder of two random layers that reads bytes."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    rng, tensors = np.random.default_rng(0), {}
    for part in parts(model_config(QWEN), FAMILIES["qwen3"]).values():
        for name, shape in zip(part.names, part.shapes, strict=True):
            tensors[name] = rng.normal(0, 0.5, shape).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    save_tokenizer(folder)
    return folder


@pytest.mark.extras
def test_the_pages_commands_go_from_a_hub_through_a_bucket_to_the_hub(
    tiny_qwen, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("tokenizers")
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # The harness reads its documents from a file.
    lines = "".join(
        json.dumps({"text": f"Ann has {n} cats. They sleep."}) + "\n" for n in range(60)
    )
    write_tasks(Path("tasks"))
    said = {}
    with a_small_hub(tmp_path, monkeypatch) as hub, a_store("memory", monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.add_folder("Qwen/Qwen3-0.6B", tiny_qwen)
        store = fsspec.filesystem("memory")
        for name in ("texts/a.jsonl", "held_out.jsonl"):
            store.pipe(f"/bucket/{name}", lines.encode())
        for command in commands():
            assert command[0] == "fwpkm"
            code = program.main(command[1:])
            shown = capsys.readouterr()
            assert code == 0, (command, shown.err)
            said[" ".join(command[1:3])] = shown.out + shown.err
        pushed = hub.files("me/memory")
        results = json.loads(store.cat("/bucket/runs/memory/results/ppl.json"))
    assert {"config.json", "README.md", "model.safetensors"} <= pushed.keys()
    assert "Qwen/Qwen3-0.6B" in pushed["README.md"].decode()
    assert "has finished its 2 steps" in said["train --resume"]
    assert Path("runs/theirs/config.json").exists()
    assert results["results"]
