"""A run with NaN or infinity names where it began and the last good checkpoint."""

import dataclasses
import io
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from fwpkm_jax.training.diagnosis import NonFiniteError, diagnose
from fwpkm_jax.training.state import init_state, model_graph, named_leaves
from tests.training.conftest import read_records
from tests.training.tiny_config import get_config

EXPERIMENT = get_config()
TRAINING = EXPERIMENT.training


def poison(tree, name, value=jnp.nan, *, everywhere=False):
    """The tree with one number, or every one, of the array `name` replaced."""
    leaves = named_leaves(tree)
    leaf = leaves[name]
    leaves[name] = leaf.at[... if everywhere else (0,) * leaf.ndim].set(value)
    return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))


@pytest.fixture(scope="module")
def state():
    return init_state(EXPERIMENT.model, memory=TRAINING.memory, optimizer=None, seed=0)


@pytest.fixture
def batch():
    random = np.random.default_rng(0)
    return {
        "tokens": random.integers(0, EXPERIMENT.model.vocab_size, (4, 17), dtype=np.int32),
        "loss_weight": np.ones((4, 16), np.float32),
    }


def cause(state, batch, clean_memory):
    return diagnose(
        model_graph(EXPERIMENT.model),
        state,
        batch,
        clean_memory=clean_memory,
        micro_batches=1,
        memory=TRAINING.memory,
    )


@pytest.mark.thorough
def test_a_parameter_is_named(state, batch):
    bad = state._replace(params=poison(state.params, "blocks/1/memory/query_proj/kernel"))
    name = cause(bad, batch, state.memory)
    assert name.startswith("the parameter blocks/1/memory/query_proj/kernel (1 of ")


@pytest.mark.slow
def test_a_fast_weight_is_named(state, batch):
    bad = state._replace(memory=poison(state.memory, "layer_1/values", jnp.inf))
    name = cause(bad, batch, state.memory)
    assert name.startswith("the fast weights layer_1/values (1 of ")


def test_a_batch_is_named(state, batch):
    batch["loss_weight"][0, 3] = np.nan
    assert cause(state, batch, state.memory) == "the batch's loss_weight is not finite"


@pytest.mark.slow
def test_the_layer_whose_output_overflows_is_named(state, batch):
    # Finite weights, finite input, output beyond float32.
    params = state.params
    for name in ("blocks/0/feed_forward/up_proj/kernel", "blocks/0/feed_forward/gate_proj/kernel"):
        leaves = named_leaves(params)
        leaves[name] = jnp.full_like(leaves[name], 1e30) * jnp.sign(leaves[name])
        params = jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
    found = cause(state._replace(params=params), batch, state.memory)
    assert found.startswith("the output of blocks/0/feed_forward")


@pytest.mark.slow
def test_what_does_not_repeat_is_said_so(state, batch):
    assert "does not repeat it" in cause(state, batch, state.memory)


@pytest.mark.slow
def test_watching_leaves_the_classes_as_they_were(state, batch):
    from fwpkm_jax.models.block import Block
    from fwpkm_jax.models.language_model import LanguageModel

    before = (Block.__call__, LanguageModel.__call__)
    cause(state, batch, state.memory)
    assert (Block.__call__, LanguageModel.__call__) == before


@pytest.mark.slow
@pytest.mark.parametrize("part", ["params", "memory", "batch"])
def test_a_run_stops_with_steps_cause_and_last_good_checkpoint(
    unbroken, tmp_path, monkeypatch, part
):
    """NaN enters after step 12; step 13's metrics arrive while step 14 is under way."""
    names = {"params": "blocks/0/mixer/q_proj/kernel", "memory": "layer_1/values"}
    compile_step = parts.compile_step

    def compile_poisoned(setup, state, batch):
        compiled = compile_step(setup, state, batch)

        def step(state, batch):
            if int(state.step) == 12:
                if part == "batch":
                    batch["loss_weight"] = batch["loss_weight"] * np.nan
                else:
                    bad = getattr(state, part)
                    # All of it: a value that no token reads would go unseen until the next save.
                    for name in [n for n in named_leaves(bad) if n == names[part]]:
                        leaf = named_leaves(bad)[name]
                        bad = jax.tree.map(
                            lambda x, leaf=leaf: x * jnp.nan if x is leaf else x, bad
                        )
                    state = state._replace(**{part: bad})
            return compiled(state, batch)

        return step

    monkeypatch.setattr(parts, "compile_step", compile_poisoned)
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(tmp_path / "run"))
    with pytest.raises(NonFiniteError) as error:
        train(experiment, stream=io.StringIO())
    message = str(error.value)
    expected = {**names, "batch": "the batch's loss_weight"}[part]
    assert "Stopped in steps 13 to 14: loss is nan at step 13." in message
    assert expected in message
    assert f"Last good checkpoint: {tmp_path / 'run' / 'checkpoints' / '10'}." in message
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [5, 10]
    assert [record["step"] for record in read_records(tmp_path / "run")] == list(range(1, 13))

    monkeypatch.undo()  # The fault is gone: the same command goes on from step 10.
    result = train(experiment, stream=io.StringIO())
    for a, e in zip(
        jax.tree.leaves(result.state[1:4]), jax.tree.leaves(unbroken.result.state[1:4]), strict=True
    ):
        np.testing.assert_array_equal(a, e)


@pytest.mark.slow
def test_a_fast_weight_that_nobody_reads_is_not_saved(unbroken, tmp_path, monkeypatch):
    """Slots that no token reads do not change the loss; the check before a save finds them."""
    run = tmp_path / "run"
    shutil.copytree(unbroken.directory, run)
    restore_state = parts.restore_state

    def restore_poisoned(*arguments, **more):
        state = restore_state(*arguments, **more)
        # No update reaches the second moments of a decayed-away gradient: only the check sees it.
        bad = poison(state.opt_state, next(n for n in named_leaves(state.opt_state) if "nu" in n))
        return state._replace(opt_state=bad)

    monkeypatch.setattr(parts, "restore_state", restore_poisoned)
    training = dataclasses.replace(TRAINING, steps=21)
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(run), training=training)
    with pytest.raises(NonFiniteError, match="Last good checkpoint"):
        train(experiment, stream=io.StringIO())
    assert checkpoint_steps(run / "checkpoints") == [10, 15, 20]
