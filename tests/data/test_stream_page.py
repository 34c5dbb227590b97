"""The commands of docs/howto/stream.md, on small files, a small hub and a bucket."""

import dataclasses
import gzip
import io
import re
import shlex
from pathlib import Path

import jax
import numpy as np
import pytest

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.data import make_dataset
from fwpkm_jax.run.train import train
from tests.data.test_streams import LINES, TEXTS, parquet_bytes
from tests.interchange.small_hub import a_small_hub
from tests.training.tiny_config import get_config

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "stream.md").read_text()
PAGE = PAGE.replace("\\\n", "")
COMMANDS = {
    re.search(r"--run_dir runs/(\w+)", command)[1]: command
    for command in re.findall(r"```bash\nfwpkm train (.*?)\n```", PAGE, re.DOTALL)
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The files that the page names, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("corpus", "books"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.parquet").write_bytes(parquet_bytes(TEXTS))
    (tmp_path / "corpus" / "b.jsonl").write_text(LINES)
    (tmp_path / "held_out.jsonl").write_text(LINES)
    (tmp_path / "web.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))


def data_of(name):
    command = shlex.split(COMMANDS[name].replace("OWNER/NAME", "somebody/tiny"))
    return parse_command_line([*command, "--data.length", "16"], default="").data


def check(data):
    for split in ("train", "valid"):
        batch = next(iter(make_dataset(data, split=split, batch_size=4, seed=0)))
        assert batch["tokens"].shape == (4, 17)


@pytest.mark.parametrize("name", ["mine", "mixed"])
def test_the_commands_read_files_of_this_machine(texts, name):
    check(data_of(name))


def test_the_command_reads_a_data_set_of_the_hub(texts, tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    with a_small_hub(tmp_path, monkeypatch) as hub:
        hub.commit("datasets/somebody/tiny", {"data/train-0.parquet": parquet_bytes(TEXTS)})
        check(data_of("hub"))


def test_the_options_that_the_page_lists_exist():
    data = data_of("mine")
    for option in re.findall(r"`--data\.(\w+)", PAGE):
        assert hasattr(data, option)


def experiment_of(run_dir, data, steps):
    experiment = get_config()
    model = dataclasses.replace(experiment.model, vocab_size=257)
    training = dataclasses.replace(experiment.training, steps=steps)
    optimizer = dataclasses.replace(experiment.optimizer, decay_steps=8)
    return dataclasses.replace(
        experiment,
        model=model,
        data=dataclasses.replace(data, length=experiment.data.length),
        training=training,
        optimizer=optimizer,
        run_dir=str(run_dir),
    )


@pytest.mark.thorough
def test_a_run_that_was_ended_goes_on_bit_for_bit(texts, tmp_path):
    data = data_of("mixed")
    whole = train(experiment_of(tmp_path / "whole", data, 8), stream=io.StringIO())
    train(experiment_of(tmp_path / "parts", data, 5), stream=io.StringIO())
    parts = train(experiment_of(tmp_path / "parts", data, 8), stream=io.StringIO())
    assert parts.step == whole.step == 8
    for a, e in zip(
        jax.tree.leaves(parts.state[1:4]), jax.tree.leaves(whole.state[1:4]), strict=True
    ):
        np.testing.assert_array_equal(a, e)
    (tmp_path / "books" / "a.parquet").write_bytes(parquet_bytes(TEXTS[::-1]))
    with pytest.raises(ValueError, match=r"train text: a\.parquet has other content"):
        train(experiment_of(tmp_path / "parts", data, 9), stream=io.StringIO())
