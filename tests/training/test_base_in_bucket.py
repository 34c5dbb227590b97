"""Runs that start from a run in a bucket, and read its frozen weights there."""

import dataclasses
import io
import tempfile

import jax
import numpy as np
import pytest

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.interchange import start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.run import load_run, setup
from fwpkm_jax.run.train import resume_experiment, train
from fwpkm_jax.storage.stores import Store
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.restore import UnreadBaseError
from fwpkm_jax.training.runs.mirror import run_folder
from fwpkm_jax.training.state import MemoryConfig, init_state, named_leaves
from tests.training.runs.stores import KINDS, a_store
from tests.training.tiny_config import get_config

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


def make_base(address):
    """A run without memories in a bucket; its weights by path."""
    experiment = get_config()
    model = dataclasses.replace(experiment.model, memory_layers=())
    training = dataclasses.replace(
        experiment.training, steps=2, memory=MemoryConfig(lifetime="batch")
    )
    experiment = dataclasses.replace(experiment, model=model, training=training, run_dir=address)
    init = init_state(model, memory=training.memory, optimizer=None, seed=5)
    start_run(experiment, Weights(init.params, {}))
    return {name: np.asarray(x) for name, x in named_leaves(init.params).items()}


def with_memory(address, run_dir):
    """The experiment that trains a memory in the base's layer 1."""
    command = f"--base {address} --run_dir {run_dir} --model.memory_layers 1"
    return parse_command_line(
        [*command.split(), "--optimizer.train", ".*/memory/.*"], default="recall"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_run_has_the_weights_of_its_base_in_a_bucket(kind, tmp_path, monkeypatch):
    with a_store(kind, monkeypatch) as address:
        expected = make_base(address)
        before = Store(address).sizes()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        parts = setup.make_setup(with_memory(f"{address}/", tmp_path / "new"))
        with Checkpoints(tmp_path / "checkpoints", parts.experiment.checkpoint) as checkpoints:
            state = setup.new_state(parts, checkpoints)
        found = named_leaves(state.params)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert checkpoints.reference.checkpoint == f"{address}/checkpoints/0"
        assert checkpoints.reference.checksums.keys() == expected.keys()
        assert not list(tmp_path.glob("fwpkm-*"))
        assert Store(address).sizes() == before


@pytest.mark.thorough
def test_only_the_checkpoints_that_are_needed_are_copied(monkeypatch):
    with a_store("memory", monkeypatch) as address:
        make_base(address)
        store = Store(address)
        store.write("checkpoints/7.json", store.read("checkpoints/0.json"))
        for chosen, steps in (("all", {"0", "7"}), ("newest", {"7"}), ("none", set()), (0, {"0"})):
            with run_folder(address, chosen) as folder:
                assert {x.name for x in folder.glob("checkpoints/*")} == steps
                assert (folder / "config.json").exists()


@pytest.mark.slow
def test_frozen_weights_are_read_from_the_bucket_and_their_loss_costs_no_checkpoint(
    tmp_path, monkeypatch
):
    run_dir = tmp_path / "new"
    with a_store("memory", monkeypatch) as address:
        expected = make_base(address)
        trained = train(with_memory(address, run_dir), stream=io.StringIO()).state
        run = load_run(run_dir)
        found = named_leaves(run.params)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        jax.tree.map(np.testing.assert_array_equal, run.params, trained.params)
        longer = resume_experiment(run_dir)
        training = dataclasses.replace(longer.training, steps=3)
        longer = dataclasses.replace(longer, training=training)

        store = Store(address)
        marker = store.read("checkpoints/0.json")
        store.remove("checkpoints/0.json")
        for use in (lambda: load_run(run_dir), lambda: train(longer, stream=io.StringIO())):
            with pytest.raises(UnreadBaseError, match=f"{address}/checkpoints/0, which holds froz"):
                use()
        with pytest.raises(FileNotFoundError, match=r"base=.* holds no complete checkpoint"):
            train(with_memory(address, tmp_path / "other"), stream=io.StringIO())
        assert not (run_dir / "damaged_checkpoints").exists()
        store.write("checkpoints/0.json", marker)
        assert train(longer, stream=io.StringIO()).step == 3
