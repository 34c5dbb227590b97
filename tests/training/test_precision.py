"""A model whose weights are bfloat16 trains in float32, unless a run chooses otherwise."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.layers import LoRAConfig
from fwpkm_jax.run import setup as parts
from fwpkm_jax.training.checkpoints.checkpoint import CheckpointConfig, Checkpoints
from fwpkm_jax.training.checkpoints.restore import read_checkpoint
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph, named_leaves
from fwpkm_jax.training.step import make_train_step
from tests.training.tiny_config import get_config

EXPERIMENT = get_config()
PLAIN = dataclasses.replace(EXPERIMENT.model, memory_layers=(), init_std=0.1)
HALF = dataclasses.replace(PLAIN, parameter_dtype="bfloat16", activation_dtype="bfloat16")


def initial(model, config, **options):
    optimizer = None if config is None else make_optimizer(config, steps=60)
    if config is not None:
        options |= {"train": config.train, "precision": config.precision}
    return init_state(model, memory=MemoryConfig(), optimizer=optimizer, seed=0, **options)


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


def test_what_trains_is_float32_and_what_is_frozen_stays_as_it_is():
    def of(config, **changes):
        return jax.eval_shape(lambda: initial(dataclasses.replace(HALF, **changes), config))

    every = of(OptimizerConfig())
    assert dtypes(every.params) == dtypes(every.opt_state) == {"float32"}
    chosen = of(OptimizerConfig(precision="parameters"))
    assert dtypes(chosen.params) == dtypes(chosen.opt_state) == {"bfloat16", "float32"}
    assert chosen.params["embedding"].dtype == jnp.bfloat16
    some = of(OptimizerConfig(train=(".*/lora_[ab]", "embedding")), lora=LoRAConfig())
    assert dtypes(some.opt_state) == {"float32"}
    named = named_leaves(some.params)
    assert named["embedding"].dtype == jnp.float32
    assert named["blocks/0/mixer/q_proj/kernel"].dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: initial(HALF, None)).params["embedding"].dtype == jnp.bfloat16


@pytest.mark.thorough
def test_a_bfloat16_checkpoint_goes_on_in_float32(tmp_path):
    model = dataclasses.replace(HALF, mixers=("swa",))
    old, new = (OptimizerConfig(precision=p) for p in ("parameters", "float32"))
    changes = {"model": model, "run_dir": str(tmp_path)}
    saved = jax.jit(lambda: initial(model, old))()
    saved = saved._replace(opt_state=jax.tree.map(lambda x: x + x.dtype.type(1), saved.opt_state))
    setup = parts.make_setup(dataclasses.replace(EXPERIMENT, optimizer=new, **changes))
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(saved, data_position=None, config={})
        checkpoints.wait()
        restored = parts.restore_state(setup, checkpoints, None, say=lambda line: None)
        assert dtypes(restored.params) == dtypes(restored.opt_state) == {"float32"}
        kept = zip(jax.tree.leaves(saved[1:3]), jax.tree.leaves(restored[1:3]), strict=True)
        for before, after in kept:
            np.testing.assert_array_equal(np.asarray(before, after.dtype), after)
    # Whoever reads the run has its weights in the model's dtype.
    shapes = jax.eval_shape(partial(initial, model, None))
    read = read_checkpoint(tmp_path / "checkpoints", 0, shapes).state.params
    assert read["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(read["embedding"][...], saved.params["embedding"][...])


@pytest.mark.slow
def test_a_bfloat16_model_follows_the_losses_of_float32():
    """60 steps at 1e-5, all weights of the same start, two micro-batches."""
    start = initial(HALF, None)
    rows = np.random.default_rng(0).integers(PLAIN.vocab_size, size=(4, 17)).astype(np.int32)
    batch = {"tokens": jnp.asarray(rows), "loss_weight": jnp.ones((4, 16))}

    def curve(model, precision):
        config = OptimizerConfig(
            learning_rate=1e-5, warmup_steps=0, final_fraction=1.0, precision=precision
        )
        optimizer = make_optimizer(config, steps=60)
        like = jax.eval_shape(lambda: initial(model, config)).params
        params = jax.tree.map(lambda x, like: x.astype(like.dtype), start.params, like)
        state = start._replace(params=params, opt_state=optimizer.init(params))
        before = [np.asarray(x) for x in jax.tree.leaves(params)]
        step = make_train_step(
            model_graph(model),
            optimizer,
            schedule=learning_rate_schedule(config, steps=60),
            micro_batches=2,
            memory=MemoryConfig(),
        )
        losses = []
        for _ in range(60):
            state = state._replace(rng=jnp.copy(start.rng), step=jnp.copy(state.step))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        pairs = zip(before, jax.tree.leaves(state.params), strict=True)
        changed = sum(int(np.sum(np.asarray(y) != x)) for x, y in pairs)
        return np.array(losses), changed / sum(x.size for x in before)

    wide, every = curve(PLAIN, "float32")
    half, also = curve(HALF, "float32")
    narrow, few = curve(HALF, "parameters")
    fall = wide[0] - wide[-1]
    assert fall > 0.015
    # Activations are rounded, so single losses differ; the fall is the same.
    assert abs((half[0] - half[-1]) - fall) < 0.1 * fall
    np.testing.assert_allclose(half, wide, atol=0.3 * fall)
    assert min(every, also) > 0.99
    # What a float32 copy of the weights is for.
    assert narrow[0] - narrow[-1] < 0.1 * fall
    assert few < 0.1
