"""A run continued with another number of memories, or with fewer than it had saved."""

import dataclasses
import io
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.run import load_run
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.checkpoints.regroup import regroup
from fwpkm_jax.training.state import MemoryConfig

SAVED = {"table": jnp.arange(24.0).reshape(4, 2, 3), "count": jnp.arange(4, dtype=jnp.int32)}


def rows(memory):
    return memory["table"][:, 0, 0].tolist()


def test_more_memories_are_copies_of_the_one_whose_sequences_they_take():
    assert rows(regroup(SAVED, 8, "first")) == [0, 0, 6, 6, 12, 12, 18, 18]
    np.testing.assert_array_equal(regroup(SAVED, 8, "mean")["table"][::2], SAVED["table"])


def test_fewer_memories_are_the_first_or_the_mean_of_those_whose_sequences_they_take():
    assert rows(regroup(SAVED, 2, "first")) == [0, 12]
    assert rows(regroup(SAVED, 2, "mean")) == [3, 15]
    assert rows(regroup(SAVED, 1, "mean")) == [9]
    assert regroup(SAVED, 2, "mean")["count"].dtype == jnp.int32


@pytest.mark.parametrize("how", ["refuse", "first", "mean"])
def test_the_same_number_is_left_as_it_is(how):
    assert regroup(SAVED, 4, how) is SAVED


def test_another_number_needs_the_setting_and_has_to_divide():
    with pytest.raises(
        ValueError, match=r"holds 4 memories, but training\.memory\.groups=2.*checkpoint\.reg"
    ):
        regroup(SAVED, 2, "refuse")
    with pytest.raises(
        ValueError, match=r"4 memories cannot become training\.memory\.groups=3.* of 4"
    ):
        regroup(SAVED, 3, "first")


def saved_with(unbroken, directory, **fields):
    config = CheckpointConfig(**fields)
    with Checkpoints(directory, config) as checkpoints:
        described = checkpoints.describe(unbroken.result.state)
        checkpoints.save(unbroken.result.state, data_position=None, config={})
    with Checkpoints(directory, config) as checkpoints:
        return described, checkpoints.restore_newest(
            jax.eval_shape(lambda: unbroken.result.state)
        ).state.memory


@pytest.mark.slow
def test_the_memories_that_are_saved_are_a_setting(unbroken, tmp_path):
    memory = unbroken.result.state.memory
    size = sum(x.nbytes for x in jax.tree.leaves(memory))
    described, restored = saved_with(unbroken, tmp_path / "all")
    assert f"memory {size / 1e3:.3g} kB" in described
    jax.tree.map(np.testing.assert_array_equal, restored, memory)

    described, restored = saved_with(unbroken, tmp_path / "first", memories="first")
    assert f"memory {size / 2e3:.3g} kB" in described
    copies = jax.tree.map(lambda x: np.stack([x[0], x[0]]), memory)
    jax.tree.map(np.testing.assert_array_equal, restored, copies)

    described, restored = saved_with(unbroken, tmp_path / "none", memories="none")
    assert "memory" not in described
    assert restored == {}


def with_groups(unbroken, directory, groups, *, steps=20, **checkpoint):
    training = dataclasses.replace(
        unbroken.experiment.training, memory=MemoryConfig(groups=groups), steps=steps
    )
    return dataclasses.replace(
        unbroken.experiment,
        run_dir=str(directory),
        training=training,
        checkpoint=dataclasses.replace(unbroken.experiment.checkpoint, **checkpoint),
    )


@pytest.mark.slow
def test_a_run_goes_on_with_one_memory_where_it_had_two(unbroken, tmp_path):
    run = shutil.copytree(unbroken.directory, tmp_path / "run")
    with pytest.raises(ValueError, match=r"groups: 2 -> 1\n(.|\n)*checkpoint\.regroup says"):
        train(with_groups(unbroken, run, 1), stream=io.StringIO())
    changed = with_groups(unbroken, run, 1, steps=21, regroup="mean", memories="none")
    result = train(changed, stream=io.StringIO())
    assert result.step == 21
    assert jax.tree.leaves(result.state.memory)[0].shape[0] == 1
    # The checkpoint of two memories still opens, as the one it was made into.
    means = jax.tree.map(
        lambda x: np.asarray(x).mean(0, keepdims=True), unbroken.result.state.memory
    )
    for mine, mean in zip(*map(jax.tree.leaves, (load_run(run, 20).memory, means)), strict=True):
        np.testing.assert_allclose(mine, mean, rtol=1e-6, atol=1e-7)
    # This session saved no memory, so the next session starts with an initial one.
    stream = io.StringIO()
    again = train(changed, stream=stream)
    assert "The checkpoint of step 21 holds no memories; new ones are used." in stream.getvalue()
    fresh = load_run(run).memory
    jax.tree.map(np.testing.assert_array_equal, fresh, again.state.memory)
    assert any(
        np.any(x != y)
        for x, y in zip(*map(jax.tree.leaves, (fresh, result.state.memory)), strict=True)
    )
