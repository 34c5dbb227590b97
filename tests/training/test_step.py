"""One training step against the same sums written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.rules import SDM
from fwpkm_jax.training.averages import gradient_weights
from fwpkm_jax.training.losses import address_loss, weighted_loss
from fwpkm_jax.training.micro_batches import broadcast_memory, check_split, split_batch
from fwpkm_jax.training.optimizer import OptimizerConfig, make_optimizer
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from tests.training.tiny_config import get_config

MODEL = get_config().model
OPTIMIZER = optax.sgd(1.0)  # A step's change of the parameters is minus the gradient.


def sample_batch(seed=0, batch=4, length=16):
    random = np.random.default_rng(seed)
    return {
        "tokens": random.integers(0, MODEL.vocab_size, (batch, length + 1), dtype=np.int32),
        "loss_weight": random.uniform(0, 1, (batch, length)).astype(np.float32),
    }


@functools.partial(jax.jit, static_argnums=0)
def start(memory):
    return init_state(MODEL, memory=memory, optimizer=OPTIMIZER, seed=0)


@functools.cache
def make_step(memory, *, micro_batches=1, **options):
    return make_train_step(
        model_graph(MODEL),
        OPTIMIZER,
        schedule=optax.constant_schedule(0.25),
        micro_batches=micro_batches,
        memory=memory,
        **options,
    )


def take_step(memory, batch, **options):
    return make_step(memory, **options)(start(memory), batch)


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


@pytest.fixture(scope="module")
def per_sequence():
    """A step with one memory per sequence, fresh for the batch: state and metrics."""
    return take_step(MemoryConfig(groups=4, lifetime="batch"), sample_batch())


@pytest.mark.thorough
def test_loss_is_the_mean_weighted_by_the_batch():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    labels = np.array([[0, 1, 2], [3, 4, 0]])
    weights = np.array([[1, 0, 2], [0.5, 1, 0]], np.float32)
    expected = 0.0
    for b in range(2):
        for t in range(3):
            probabilities = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            expected -= weights[b, t] * np.log(probabilities[labels[b, t]])
    np.testing.assert_allclose(weighted_loss(logits, labels, weights), expected, rtol=1e-6)


@pytest.mark.thorough
def test_step_follows_the_gradient_of_the_slow_weights_alone(per_sequence):
    memory, batch = MemoryConfig(groups=4, lifetime="batch"), sample_batch()
    state = start(memory)

    def loss_fn(params):
        model = nnx.merge(model_graph(MODEL), params)
        logits = model(
            jnp.asarray(batch["tokens"][:, :-1]), broadcast_memory(state.memory, 4)
        ).logits
        log_probabilities = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probabilities, batch["tokens"][:, 1:, None], axis=-1)
        return -jnp.sum(chosen[..., 0] * batch["loss_weight"]) / np.sum(batch["loss_weight"])

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(state.params)
    new, metrics = per_sequence
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-4)
    np.testing.assert_allclose(metrics["param_norm"], optax.tree.norm(new.params), rtol=1e-6)
    assert metrics["lr"] == 0.25
    assert_trees_close(
        new.params, jax.tree.map(jnp.subtract, state.params, grads), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_the_memory_of_a_state_is_the_start_that_a_step_has_trained():
    rule = SDM(num_subkeys=4, value_dim=8, num_writes=2, num_reads=2, first_table="learned")
    fast_weight = dataclasses.replace(MODEL.fast_weight, rule=rule)
    model = dataclasses.replace(MODEL, fast_weight=fast_weight)
    memory = MemoryConfig(groups=4, lifetime="batch")
    with pytest.raises(ValueError, match="lifetime='carried' with first_table='learned'"):
        init_state(model, memory=MemoryConfig(groups=4), optimizer=OPTIMIZER, seed=0)

    @jax.jit
    def begin():
        return init_state(model, memory=memory, optimizer=OPTIMIZER, seed=0)

    step = make_train_step(
        model_graph(model),
        OPTIMIZER,
        schedule=optax.constant_schedule(1.0),
        micro_batches=2,
        memory=memory,
    )
    before, after = begin(), step(begin(), sample_batch())[0]
    tables = [
        nnx.merge(model_graph(model), state.params).blocks[1].memory.first_values[...]
        for state in (before, after)
    ]
    for state, table in zip((before, after), tables, strict=True):
        np.testing.assert_array_equal(state.memory["layer_1"].values, table[None])
    assert np.sum(np.any(tables[0] != tables[1], axis=1)) > 1


@pytest.mark.slow
def test_schedule_free_takes_gradients_between_the_average_and_the_newest_iterate():
    memory = MemoryConfig(groups=4, lifetime="batch")
    config = OptimizerConfig(
        name="schedule_free", schedule="constant", learning_rate=0.05, warmup_steps=0
    )
    optimizer = make_optimizer(config, steps=10)
    step = make_train_step(
        model_graph(MODEL),
        optimizer,
        schedule=optax.constant_schedule(0.05),
        micro_batches=1,
        memory=memory,
    )
    state = jax.jit(lambda: init_state(MODEL, memory=memory, optimizer=optimizer, seed=0))()
    for seed in range(2):  # After the first step the average is the newest iterate.
        state, _ = step(state, sample_batch(seed))
    measured = {}
    for name, params in {
        "between": gradient_weights(state.params, state.opt_state),
        "average": state.params,
    }.items():
        here = start(memory)._replace(params=jax.tree.map(jnp.copy, params))
        measured[name] = make_step(memory)(here, sample_batch(2))[1]
    _, metrics = step(state, sample_batch(2))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], measured["between"][name], rtol=1e-5)
        assert abs(metrics[name] - measured["average"][name]) > 1e-4


@pytest.mark.thorough
def test_memory_that_lives_one_batch_stays_as_it_was_initialised(per_sequence):
    memory = start(MemoryConfig(groups=4, lifetime="batch")).memory
    assert {leaf.shape[0] for leaf in jax.tree.leaves(memory)} == {1}
    jax.tree.map(np.testing.assert_array_equal, per_sequence[0].memory, memory)
    assert int(per_sequence[0].step) == 1


@pytest.mark.thorough
def test_micro_batches_change_nothing_where_each_has_its_memories(per_sequence):
    split, metrics = take_step(
        MemoryConfig(groups=4, lifetime="batch"), sample_batch(), micro_batches=2
    )
    whole, whole_metrics = per_sequence
    assert_trees_close(split.params, whole.params, rtol=1e-4, atol=1e-6)
    assert metrics.keys() == whole_metrics.keys()
    assert any(name.startswith("layer_1/") for name in metrics)
    for name in ("loss", "grad_norm", "param_norm", "lr"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-4)
    # Each half has as many paired tokens and chunks, so that the halves' means have the whole mean.
    for name in ("memory_loss", "addressing_loss", "gate_mean"):
        name = f"layer_1/{name}"
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-4)
        assert metrics[name] != 0


@pytest.mark.slow
def test_the_loss_block_changes_nothing(per_sequence):
    blocks, metrics = take_step(
        MemoryConfig(groups=4, lifetime="batch"), sample_batch(), loss_block=7
    )
    whole, whole_metrics = per_sequence
    assert_trees_close(blocks.params, whole.params, rtol=1e-4, atol=1e-6)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-5)


@pytest.mark.thorough
def test_carried_memory_goes_through_the_micro_batches_and_on_to_the_next_step():
    memory, batch = MemoryConfig(groups=2, lifetime="carried"), sample_batch()
    state = start(memory)

    @jax.jit
    def written(params, tokens, memory):
        return nnx.merge(model_graph(MODEL), params)(tokens, memory).memory

    # Memory 0 owns sequences 0 and 1, memory 1 owns 2 and 3; each micro-batch has one of each.
    first = written(state.params, batch["tokens"][np.array([0, 2]), :-1], state.memory)
    second = written(state.params, batch["tokens"][np.array([1, 3]), :-1], first)
    new, _ = take_step(memory, batch, micro_batches=2)
    assert_trees_close(new.memory, second, rtol=1e-4, atol=1e-6)
    changes = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), new.memory, state.memory)
    assert max(jax.tree.leaves(changes)) > 0


@pytest.mark.thorough
def test_labels_of_weight_zero_do_not_count():
    batch = sample_batch()
    batch["loss_weight"] = np.zeros_like(batch["loss_weight"])
    state, metrics = take_step(MemoryConfig(groups=4, lifetime="batch"), batch)
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    jax.tree.map(
        np.testing.assert_array_equal,
        state.params,
        start(MemoryConfig(groups=4, lifetime="batch")).params,
    )


def test_a_step_that_is_not_finite_leaves_the_parameters():
    memory, batch = MemoryConfig(groups=4, lifetime="batch"), sample_batch()
    batch["loss_weight"][1, 3] = np.nan
    state, metrics = take_step(memory, batch)
    assert np.isnan(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, start(memory).params)
    assert int(state.step) == 1


@pytest.mark.thorough
def test_a_gradient_that_is_not_finite_leaves_the_parameters_though_the_loss_is_finite():
    """Huge logits: the loss is finite in float32, the gradient's norm is not."""
    memory = MemoryConfig(groups=4, lifetime="batch")
    huge = start(memory)
    huge.params.head[...] = 1e21 * huge.params.head[...]
    before = jax.tree.map(np.asarray, (huge.params, huge.opt_state))
    state, metrics = make_step(memory)(huge, sample_batch())
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert int(state.step) == 1


def test_split_keeps_each_memorys_sequences():
    batch = {"tokens": np.arange(12)[:, None]}
    carried = split_batch(batch, micro_batches=2, memory=MemoryConfig(groups=3, lifetime="carried"))
    np.testing.assert_array_equal(
        carried["tokens"][..., 0], [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    )
    fresh = split_batch(batch, micro_batches=2, memory=MemoryConfig(groups=6, lifetime="batch"))
    np.testing.assert_array_equal(fresh["tokens"][..., 0], np.arange(12).reshape(2, 6))


@pytest.mark.parametrize(
    ("batch_size", "micro_batches", "groups", "lifetime", "named"),
    [
        (8, 3, 1, "carried", "micro_batches=3"),
        (8, 2, 8, "carried", "groups=8"),
        (8, 1, 3, "batch", "groups=3"),
        (8, 2, 1, "batch", "groups=1"),
    ],
)
def test_batches_that_do_not_split_are_refused(batch_size, micro_batches, groups, lifetime, named):
    with pytest.raises(ValueError, match=named):
        check_split(
            batch_size,
            micro_batches=micro_batches,
            memory=MemoryConfig(groups=groups, lifetime=lifetime),
        )


@pytest.mark.slow
def test_rows_of_documents_train_apart_in_any_micro_batches():
    """Segment ids reach the model with any micro-batches, and a step reports its padding."""
    memory, batch = MemoryConfig(groups=4, lifetime="batch"), sample_batch()
    ids = np.repeat([[1, 2, 0, 4]], 4, axis=0).repeat(4, axis=1).astype(np.int32)
    batch = batch | {"segment_ids": ids, "loss_weight": batch["loss_weight"] * (ids == 4)}
    state, metrics = take_step(memory, batch)
    assert metrics["padding"] == 0.25
    split, others = take_step(memory, batch, micro_batches=2)
    assert_trees_close(split.params, state.params, rtol=1e-4, atol=1e-6)
    assert others["padding"] == 0.25
    one = take_step(memory, batch | {"segment_ids": np.ones_like(ids)})[1]
    assert one["padding"] == 0
    assert abs(one["loss"] - metrics["loss"]) > 1e-4


@pytest.mark.thorough
def test_the_address_loss_draws_a_question_to_its_statement():
    """Written out in NumPy for two tokens that ask, and felt by the gradient of the queries."""
    random = np.random.default_rng(0)
    query = random.normal(0, 0.3, (1, 6, 2, 3)).astype(np.float32)
    distance = np.zeros((1, 6), np.int32)
    distance[0, 3], distance[0, 5] = 2, 4  # Of tokens 1 and 1.
    segments = np.array([[1, 1, 1, 2, 0, 2]])
    flat, losses = query.reshape(6, 6).astype(float), []
    for asks, earlier in ((3, [0, 1, 2]), (5, [0, 1, 2, 3])):
        scores = -4 * np.sum((flat[asks] - flat[earlier]) ** 2, axis=-1)
        losses.append(np.log(np.sum(np.exp(scores))) - scores[1])
    found = address_loss(jnp.asarray(query), jnp.asarray(distance), segment_ids=segments)
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-5)
    drawn = MemoryConfig(groups=4, lifetime="batch", address_loss=2.0)
    with pytest.raises(ValueError, match="say where an answer was told"):
        take_step(drawn, sample_batch())


@pytest.mark.slow
def test_the_address_loss_is_logged_and_moves_the_weights():
    batch = sample_batch() | {"answer_distance": np.zeros((4, 16), np.int32)}
    batch["answer_distance"][:, 9] = 5
    memory = MemoryConfig(groups=4, lifetime="batch")
    _, plain = take_step(memory, batch)
    drawn = MemoryConfig(groups=4, lifetime="batch", address_loss=2.0)
    _, metrics = take_step(drawn, batch)
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-5)
    assert metrics["address_loss"] > 0
    assert metrics["grad_norm"] != plain["grad_norm"]
