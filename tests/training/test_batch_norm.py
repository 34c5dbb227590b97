"""Batch norms: training updates their running statistics, evaluation uses them."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph, named_leaves
from fwpkm_jax.training.step import make_train_step
from tests.models.test_language_model import CONFIG

MODEL = replace(
    CONFIG,
    mixers=("swa",),
    memory_layers=(),
    pkm_layers=(0,),
    pkm=replace(CONFIG.pkm, query_norm=False, query_batch_norm=True),
)
MEAN, VARIANCE = (f"blocks/0/feed_forward/query_{name}" for name in ("mean", "variance"))


@pytest.mark.thorough
def test_a_step_moves_running_statistics_a_tenth_of_the_way_and_nothing_else_does():
    optimizer = OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    transform = make_optimizer(optimizer, steps=2)
    state = init_state(MODEL, memory=MemoryConfig(), optimizer=transform, seed=0)
    params, graphdef = jax.tree.map(np.asarray, state.params), model_graph(MODEL)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (4, 9)).astype(np.int32)
    step = make_train_step(
        graphdef,
        transform,
        schedule=learning_rate_schedule(optimizer, steps=2),
        micro_batches=2,
        memory=MemoryConfig(),
    )
    after, _ = step(state, {"tokens": tokens, "loss_weight": np.ones((4, 8), np.float32)})

    @jax.jit
    def statistics(params, tokens):
        model: LanguageModel = nnx.merge(graphdef, params)
        return model.hidden(tokens, {}, batch_statistics=True).pkm_statistics["layer_0"]

    halves = [statistics(params, tokens[rows, :-1]) for rows in (slice(2), slice(2, 4))]
    moved, before = named_leaves(after.params), named_leaves(params)
    for name, field in ((MEAN, "mean"), (VARIANCE, "variance")):
        batch = np.mean([getattr(half, field) for half in halves], axis=0)
        expected = 0.9 * before[name] + 0.1 * batch
        np.testing.assert_allclose(moved[name], expected, rtol=1e-5, atol=1e-7)
        assert np.max(np.abs(batch - before[name])) > 0.01


@pytest.mark.thorough
def test_layers_computed_again_norm_by_the_same_batch():
    """With `remat` as without: outputs, and the statistics that the running ones move towards."""
    model = LanguageModel(MODEL, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(2).integers(0, MODEL.vocab_size, (2, 8)).astype(np.int32)

    @partial(jax.jit, static_argnames="remat")
    def read(tokens, remat):
        hidden = model.hidden(tokens, {}, remat=remat, batch_statistics=True)
        return hidden.x, hidden.pkm_statistics

    again, kept = (read(tokens, remat) for remat in ("block", None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, kept)
    assert set(kept[1]) == {"layer_0"}


@pytest.mark.thorough
def test_an_evaluation_reads_each_sequence_as_if_alone():
    model = LanguageModel(MODEL, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(1).integers(0, MODEL.vocab_size, (2, 8)).astype(np.int32)
    read = jax.jit(lambda tokens: model(tokens, {}).logits)
    np.testing.assert_allclose(read(tokens)[1:], read(tokens[1:]), rtol=1e-5, atol=1e-6)
