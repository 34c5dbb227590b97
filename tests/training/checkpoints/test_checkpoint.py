"""Damaged and unfinished checkpoints, and which ones are kept."""

import contextlib
import gc
import logging
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as orbax_v1
import pytest
import tensorstore

from fwpkm_jax.run import setup as parts
from fwpkm_jax.training.checkpoints import restore
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.checkpoints.restore import (
    DamagedCheckpointError,
    checkpoint_steps,
    find_step,
    nested,
    read_arrays,
    read_checkpoint,
)
from fwpkm_jax.training.optimizer import make_optimizer
from fwpkm_jax.training.state import TrainState, init_state


@pytest.fixture
def abandoned_reads(monkeypatch):
    """Collects the reads that Orbax abandons: if one of its parallel reads fails, it drops all."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    yield
    gc.collect()


@pytest.fixture
def copied(unbroken, tmp_path):
    """A copy of the finished run's checkpoints of steps 10, 15 and 20, to be damaged."""
    return shutil.copytree(unbroken.directory / "checkpoints", tmp_path / "run" / "checkpoints")


@pytest.fixture(scope="module")
def abstract(unbroken):
    experiment = unbroken.experiment
    return jax.eval_shape(
        partial(
            init_state,
            experiment.model,
            memory=experiment.training.memory,
            optimizer=make_optimizer(experiment.optimizer, steps=20),
            seed=0,
        )
    )


def assert_same_state(actual, expected):
    for a, e in zip(jax.tree.leaves(actual[:4]), jax.tree.leaves(expected[:4]), strict=True):
        np.testing.assert_array_equal(a, e)
    np.testing.assert_array_equal(*(jax.random.key_data(s.rng) for s in (actual, expected)))


@pytest.mark.thorough
def test_a_checkpoint_gives_back_what_was_saved(unbroken, abstract):
    restored = read_checkpoint(unbroken.directory / "checkpoints", 20, abstract)
    assert_same_state(restored.state, unbroken.result.state)
    assert restored.data_position == {"next_index": 20}
    assert restored.metrics == unbroken.result.results["validation"]


@pytest.mark.slow
def test_a_restored_state_lies_as_a_new_one(unbroken, tmp_path):
    setup = parts.make_setup(unbroken.experiment)
    with Checkpoints(unbroken.directory / "checkpoints", CheckpointConfig()) as checkpoints:
        batches = SimpleNamespace(set_state=lambda position: None)
        restored = parts.restore_state(setup, checkpoints, batches, say=lambda line: None)
        new = parts.new_state(setup, checkpoints)

    def lies(state):  # What the key of a compiled program depends on.
        return [
            (x.shape, x.dtype, x.sharding, x.committed, getattr(x, "weak_type", False))
            for x in jax.tree.leaves(state)
        ]

    assert jax.tree.structure(restored) == jax.tree.structure(new)
    assert lies(restored) == lies(new) == lies(unbroken.result.state)


@pytest.mark.slow
@pytest.mark.usefixtures("abandoned_reads")
@pytest.mark.parametrize(
    "damage",
    [
        "truncate",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("empty", "remove", "flip")),
    ],
)
def test_a_damaged_file_is_never_taken_for_a_checkpoint(copied, abstract, unbroken, damage):
    """Damages each file in turn; the restored state must be the newest one or the one before it."""
    whole = shutil.copytree(copied / "20", copied.parent / "whole")
    names = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    skipped = 0
    for name in names:
        contents = (whole / name).read_bytes()
        target = copied / "20" / name
        if damage == "remove":
            target.unlink()
        elif damage == "flip":
            middle = len(contents) // 2
            flipped = bytes([contents[middle] ^ 0x10])
            target.write_bytes(contents[:middle] + flipped + contents[middle + 1 :])
        else:
            target.write_bytes(contents[: len(contents) // 2] if damage == "truncate" else b"")
        try:
            restored = read_checkpoint(copied, 20, abstract)
        except DamagedCheckpointError:
            skipped += 1
        else:
            assert_same_state(restored.state, unbroken.result.state)
            assert restored.data_position == {"next_index": 20}
        target.write_bytes(contents)
    assert skipped >= 4  # At the least params, optimizer, memory and position.


@pytest.mark.thorough
def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(copied, abstract, caplog):
    shutil.rmtree(copied / "20" / "params")
    with (
        caplog.at_level(logging.WARNING),
        Checkpoints(copied, CheckpointConfig()) as checkpoints,
    ):
        restored = checkpoints.restore_newest(abstract)
        assert int(restored.state.step) == 15
        assert str(copied / "20") in caplog.text
        assert checkpoint_steps(copied) == [10, 15]
        assert (copied.parent / "damaged_checkpoints" / "20" / "memory").is_dir()
        # The step it held can be saved again.
        state = restored.state._replace(step=jnp.asarray(20, jnp.int32))
        checkpoints.save(state, data_position={}, config={})
    assert int(read_checkpoint(copied, 20, abstract).state.step) == 20


@pytest.mark.thorough
def test_losing_another_process_while_reading_is_no_damage(copied, abstract, monkeypatch):
    @contextlib.contextmanager
    def together():
        yield
        raise jax.errors.JaxRuntimeError("Connection closed by peer")

    monkeypatch.setattr(restore, "together", together)
    with (
        Checkpoints(copied, CheckpointConfig()) as checkpoints,
        pytest.raises(jax.errors.JaxRuntimeError, match="closed by peer"),
    ):
        checkpoints.restore_newest(abstract)
    assert checkpoint_steps(copied) == [10, 15, 20]


@pytest.mark.thorough
def test_a_checkpoint_that_was_never_completed_is_named_and_passed_over(copied, abstract, caplog):
    half = copied / "25.orbax-checkpoint-tmp"
    shutil.copytree(copied / "20" / "params", half / "params.orbax-checkpoint-tmp")
    with (
        caplog.at_level(logging.WARNING),
        Checkpoints(copied, CheckpointConfig()) as checkpoints,
    ):
        assert str(half) in caplog.text
        assert int(checkpoints.restore_newest(abstract).state.step) == 20
    assert not half.exists()


@pytest.mark.thorough
def test_no_whole_checkpoint_is_an_error_and_none_at_all_a_new_run(copied, abstract, tmp_path):
    for step in (10, 15, 20):
        shutil.rmtree(copied / str(step) / "memory")
    with (
        Checkpoints(copied, CheckpointConfig()) as checkpoints,
        pytest.raises(DamagedCheckpointError, match=r"\[10, 15, 20\]"),
    ):
        checkpoints.restore_newest(abstract)
    assert checkpoint_steps(copied) == [10, 15, 20]
    with Checkpoints(tmp_path / "new", CheckpointConfig()) as checkpoints:
        assert checkpoints.restore_newest(abstract) is None


@pytest.mark.thorough
def test_the_newest_and_the_best_are_kept(unbroken, tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: 2.5}
    with Checkpoints(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        for step, loss in losses.items():
            state = unbroken.result.state._replace(step=jnp.asarray(step, jnp.int32))
            metrics = None if loss is None else {"loss": loss}
            checkpoints.save(state, data_position={}, config={}, metrics=metrics)
    assert checkpoint_steps(tmp_path) == [2, 5, 6]
    assert find_step(tmp_path, "best") == 2
    assert find_step(tmp_path, None) == 6


@pytest.mark.thorough
def test_saving_is_not_disturbed_by_steps_that_reuse_the_arrays(unbroken, abstract, tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    state = jax.tree.map(jnp.array, unbroken.result.state._replace(rng=jnp.zeros(())))
    state = state._replace(rng=unbroken.result.state.rng)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(state, data_position={}, config={})
        overwrite((state.params, state.opt_state, state.memory))
    assert_same_state(read_checkpoint(tmp_path, 20, abstract).state, unbroken.result.state)


@pytest.mark.thorough
def test_best_needs_a_validation(unbroken, tmp_path):
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(unbroken.result.state, data_position={}, config={})
    with pytest.raises(FileNotFoundError, match="validate_every"):
        find_step(tmp_path, "best")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        find_step(tmp_path / "elsewhere", None)


def test_values_out_of_range_are_named():
    with pytest.raises(ValueError, match="every=0"):
        CheckpointConfig(every=0)
    with pytest.raises(ValueError, match="keep=1"):
        CheckpointConfig(keep=1)


@pytest.mark.thorough
def test_the_next_interface_of_orbax_reads_our_checkpoints(unbroken):
    newest = unbroken.directory / "checkpoints" / "20"
    params = nested(unbroken.result.state.params)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: x.update(sharding=device), like)
    loaded = orbax_v1.load_checkpointables(newest, {"params": like, "position": None})
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], params)
    assert loaded["position"]["step"] == 20


def bytes_read():
    (counter,) = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return counter["values"][0]["value"]


def test_arrays_that_are_not_asked_for_are_not_read(tmp_path):
    """Random numbers, which do not get smaller on disk."""
    numbers = np.random.default_rng(0).standard_normal((4, 2**16), np.float32)
    params = {"first": jnp.asarray(numbers[0]), "second": jnp.asarray(numbers[1])}
    moments = {"mu": jnp.asarray(numbers[2]), "nu": jnp.asarray(numbers[3])}
    state = TrainState(jnp.int32(1), params, moments, {}, jax.random.key(0))
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(state, data_position=None, config={})
    one = numbers[0].nbytes
    before = bytes_read()
    read = read_checkpoint(tmp_path, 1, jax.eval_shape(lambda: state._replace(opt_state=())))
    assert jax.tree.leaves(read.state.opt_state) == []
    weights = bytes_read() - before
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {"nu": jax.ShapeDtypeStruct((2**16,), jnp.float32, sharding=device)}
    before = bytes_read()
    np.testing.assert_array_equal(
        read_arrays(tmp_path / "1", wanted, item="optimizer")["nu"], numbers[3]
    )
    moment = bytes_read() - before
    before = bytes_read()
    read_checkpoint(tmp_path, 1, jax.eval_shape(lambda: state))
    everything = bytes_read() - before
    assert 0.85 < weights / (2 * one) < 1.02
    assert 0.85 < moment / one < 1.02
    assert 0.85 < everything / (4 * one) < 1.02
