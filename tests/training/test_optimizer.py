"""The learning rate's schedule, the parameters that decay, clipping."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fwpkm_jax.training.optimizer import (
    OptimizerConfig,
    decay_mask,
    learning_rate_schedule,
    make_optimizer,
)
from fwpkm_jax.training.state import init_state, named_leaves
from tests.training.tiny_config import get_config


def test_learning_rate_follows_warmup_and_cosine():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    schedule = learning_rate_schedule(config, steps=14)
    for step in range(20):
        if step < 4:
            expected = 2.0 * (1 + 4 * step / 4) / 5  # Linear from 2/5 to 2.
        else:
            progress = min((step - 4) / 10, 1)
            expected = 0.2 + 1.8 * (1 + math.cos(math.pi * progress)) / 2
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)


def test_decay_steps_fixes_the_end_whatever_the_length_of_the_run():
    config = OptimizerConfig(decay_steps=50, warmup_steps=10)
    short, long = (learning_rate_schedule(config, steps=steps) for steps in (20, 200))
    np.testing.assert_array_equal([short(s) for s in range(60)], [long(s) for s in range(60)])


@pytest.mark.parametrize("warmup_steps", [0, 30])
def test_learning_rate_is_finite_without_warmup_and_with_one_longer_than_the_run(warmup_steps):
    schedule = learning_rate_schedule(OptimizerConfig(warmup_steps=warmup_steps), steps=20)
    values = np.array([float(schedule(step)) for step in range(20)])
    assert np.all(values > 0)
    assert np.all(values <= 1e-3 * (1 + 1e-6))


def test_decay_spares_norms_biases_and_vectors():
    params = {
        "kernel": jnp.ones((2, 3)),
        "bias": jnp.ones(3),
        "log_decay": jnp.ones(4),
        "heads": {"bias": jnp.ones((2, 3)), "query_norm": {"scale": jnp.ones((2, 3))}},
    }
    assert decay_mask(params) == {
        "kernel": True,
        "bias": False,
        "log_decay": False,
        "heads": {"bias": False, "query_norm": {"scale": False}},
    }


def test_the_model_decays_its_matrices_and_nothing_else():
    experiment = get_config()
    params = jax.eval_shape(
        lambda: init_state(
            experiment.model, memory=experiment.training.memory, optimizer=None, seed=0
        )
    ).params
    shapes, decays = named_leaves(params), named_leaves(decay_mask(params))
    assert {name for name, decayed in decays.items() if decayed} == {
        name for name, leaf in shapes.items() if leaf.ndim >= 2
    }
    assert any(decays.values())
    assert not all(decays.values())


def test_weight_decay_is_decoupled():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1, clip_norm=None)
    optimizer = make_optimizer(config, steps=10)
    params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 3.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 3.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0)


def test_first_update_is_adams():
    # After one step both moments are unbiased: the update is lr * g / (|g| + eps).
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(config, steps=10)
    params = {"bias": jnp.array([1.0, 2.0])}
    grads = {"bias": jnp.array([1e-3, -40.0])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["bias"], [-0.5, 0.5], rtol=1e-4)


@pytest.mark.parametrize(("clip_norm", "scale"), [(1.0, 1 / 5), (10.0, 1.0), (None, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(clip_norm, scale):
    # The first moment is (1 - beta1) times the gradient that AdamW saw.
    optimizer = make_optimizer(OptimizerConfig(clip_norm=clip_norm), steps=10)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}  # Norm 5.
    _, state = optimizer.update(grads, optimizer.init(grads), grads)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["a"], 0.1 * 3 * scale, rtol=1e-6)
    np.testing.assert_allclose(first_moment["b"], 0.1 * 4 * scale, rtol=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.0},
        {"final_fraction": 1.5},
        {"warmup_steps": -1},
        {"decay_steps": 0},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"clip_norm": 0.0},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_out_of_range_are_named(values):
    (name,) = values
    with pytest.raises(ValueError, match=f"{name}="):
        OptimizerConfig(**values)
