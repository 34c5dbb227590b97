"""docs/howto/own_run.md: ids of another program, eight devices, a bucket, Weights & Biases."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fwpkm_jax.data import TokenFile
from tests.interchange.test_hf_commands import save_tokenizer
from tests.training.mesh_flags import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "own_run.md").read_text()
SMALLER = (
    "--model.mixers gdn swa --model.memory_layers 1 --model.model_dim 16 --model.mlp_dim 16 "
    "--model.window 8 --model.attention.num_heads 2 --model.attention.num_kv_heads 1 "
    "--model.attention.head_dim 8 --model.gdn.num_key_heads 2 --model.gdn.num_value_heads 2 "
    "--model.gdn.key_head_dim 8 --model.gdn.value_head_dim 8 --model.fast_weight.chunk_size 8 "
    "--model.fast_weight.rule.num_subkeys 8 --model.fast_weight.rule.key_dim 8 "
    "--model.fast_weight.rule.value_dim 8 --data.length 32 --training.batch_size 8 "
    "--training.micro_batches 1 --training.steps 2 --training.validation_batches 1"
)
"""The page's model at the least sizes."""


@pytest.fixture
def ids(tmp_path, monkeypatch):
    """Ids of another program in the current folder, and the page's lines that write them anew."""
    monkeypatch.chdir(tmp_path)
    ids = (np.arange(9000) % 256).astype(np.uint16)
    ids.tofile("ids.bin")
    Path("tokens").mkdir()
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(lines, {})
    exec(lines.replace("train.bin", "valid.bin"), {})
    return ids


def test_the_pages_lines_write_what_training_reads(ids):
    file = TokenFile(Path("tokens/train.bin"), vocab_size=256)
    np.testing.assert_array_equal(file[0 : len(ids)], ids)
    assert (len(file), file.num_entries) == (9000, 3)


def test_the_lines_of_the_page_on_data_write_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("first.npy", np.arange(5))
    np.save("second.npy", np.array([31_999, 2]))
    page = (ROOT / "docs" / "howto" / "data.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    Path("tokens").mkdir()
    exec(lines, {})
    file = TokenFile(Path("tokens/train.bin"), vocab_size=32_000)
    assert [file.entry(n).tolist() for n in (0, 1)] == [[0, 1, 2, 3, 4], [31_999, 2]]


@pytest.mark.thorough
def test_the_pages_command_trains_on_eight_devices_into_a_bucket(ids):
    pytest.importorskip("tokenizers")
    save_tokenizer(Path())
    (command,) = re.findall(r"```bash\nfwpkm (.*?)```", PAGE, re.DOTALL)
    command = command.replace("\\\n", "").replace("s3://BUCKET", "memory://bucket")
    run = [sys.executable, "-m", "tests.docs.own_run", "memory://bucket/runs/mine"]
    done = subprocess.run(
        [*run, *shlex.split(command), *SMALLER.split()],
        env={**os.environ, **environment(8), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "By estimate a step takes " in done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["code"], told["steps"]) == (0, [2])
    assert {"config.json", "results.json", "checkpoints/2.json"} <= {*told["stored"]}
