"""NaN in a gradient, in slots that may stay unread, in a batch: it is never saved.

What a run says of NaN in a parameter and in whole tables is in tests/training/test_diagnosis.py.
"""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.layers.mlp import SwiGLU
from fwpkm_jax.run import setup as parts
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.checksum import non_finite_leaves
from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from fwpkm_jax.training.diagnosis import NonFiniteError
from tests.training.conftest import read_records

pytestmark = pytest.mark.slow


@jax.custom_vjp
def not_differentiable(x):
    """`x`, whose gradient is NaN."""
    return x


not_differentiable.defvjp(lambda x: (x, None), lambda _, grad: (jnp.full_like(grad, jnp.nan),))


def assert_goes_on_as(unbroken, experiment):
    """The fault is gone: the same command ends as the run that never had it."""
    result = train(experiment, stream=io.StringIO())
    for part in ("params", "opt_state", "memory"):
        jax.tree.map(
            np.testing.assert_array_equal,
            getattr(result.state, part),
            getattr(unbroken.result.state, part),
        )


def test_a_gradient_is_named(fault, unbroken, tmp_path, monkeypatch):
    call = SwiGLU.__call__
    monkeypatch.setattr(
        SwiGLU, "__call__", lambda self, x, **more: not_differentiable(call(self, x, **more))
    )
    experiment = dataclasses.replace(unbroken.experiment, seed=1, run_dir=str(tmp_path / "run"))
    with fault("NaN in a gradient"), pytest.raises(NonFiniteError) as error:
        train(experiment, stream=io.StringIO())
    message = str(error.value)
    assert "grad_norm is nan at step 1" in message
    assert "the gradient of blocks/1/feed_forward" in message
    assert "none was saved" in message
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == []


def at_step(monkeypatch, step, damage):
    """Damages the state and the batch that a step is given."""
    compile_step = parts.compile_step

    def compile_damaged(setup, state, batch):
        compiled = compile_step(setup, state, batch)

        def train_step(state, batch):
            if int(state.step) == step:
                state, batch = damage(state, batch)
            return compiled(state, batch)

        return train_step

    monkeypatch.setattr(parts, "compile_step", compile_damaged)


@pytest.mark.parametrize("slot", range(0, 16, 3))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_slot_is_named_and_not_saved(fault, unbroken, tmp_path, monkeypatch, slot, value):
    """The check before a checkpoint finds NaN in slots that the loss does not depend on."""

    def damage(state, batch):
        memory = state.memory["layer_1"]
        values = memory.values.at[1, slot, 3].set(value)
        return state._replace(memory={"layer_1": memory._replace(values=values)}), batch

    at_step(monkeypatch, 12, damage)
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(tmp_path / "run"))
    with fault("NaN or infinity in a fast weight"), pytest.raises(NonFiniteError) as error:
        train(experiment, stream=io.StringIO())
    assert "the fast weights layer_1/" in str(error.value)
    assert checkpoint_steps(tmp_path / "run" / "checkpoints") == [5, 10]
    monkeypatch.undo()
    assert_goes_on_as(unbroken, experiment)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_label_of_a_batch_is_enough(fault, unbroken, tmp_path, monkeypatch, value):
    def damage(state, batch):
        weight = np.array(batch["loss_weight"])
        weight[2, 7] = value
        return state, {**batch, "loss_weight": weight}

    at_step(monkeypatch, 7, damage)
    experiment = dataclasses.replace(unbroken.experiment, run_dir=str(tmp_path / "run"))
    with fault("NaN or infinity in a batch"), pytest.raises(NonFiniteError, match="at step 8"):
        train(experiment, stream=io.StringIO())
    assert [record["step"] for record in read_records(tmp_path / "run")] == list(range(1, 8))
    monkeypatch.undo()
    assert_goes_on_as(unbroken, experiment)


def test_the_unbroken_run_is_finite(unbroken):
    state = unbroken.result.state
    assert non_finite_leaves((state.params, state.opt_state, state.memory)) == []
