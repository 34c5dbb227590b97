"""The learning rate's schedule, the parameters that decay, clipping."""

import dataclasses
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.interchange import export_run, read_folder
from fwpkm_jax.layers import AttentionConfig, TitansConfig, parameter
from fwpkm_jax.layers.partition import Partition
from fwpkm_jax.models.language_model import LanguageModel, ModelConfig
from fwpkm_jax.rules import SDM
from fwpkm_jax.run.evaluate import evaluate
from fwpkm_jax.run.load import load_run
from fwpkm_jax.run.train import train
from fwpkm_jax.training.averages import ema_names, ema_weights, gradient_weights
from fwpkm_jax.training.optimizer import (
    OptimizerConfig,
    decay_mask,
    global_norm,
    joined,
    learning_rate_schedule,
    make_optimizer,
    side_by_side,
)
from fwpkm_jax.training.sharding import state_shardings
from fwpkm_jax.training.state import init_state, model_graph, named_leaves, trained_part
from tests.training.conftest import read_records
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


def test_a_parameter_decays_as_its_role_says_whatever_its_name_and_shape():
    params = {
        "norm_bias": parameter(jnp.ones(3), "matrix"),
        "kernel": parameter(jnp.ones((2, 3)), "scale"),
        "kernels": {"0": parameter(jnp.ones((2, 3, 3)), "norm_scale")},
        "kept": parameter(jnp.ones((2, 3)), "matrix", decay=False),
    }
    assert named_leaves(decay_mask(params)) == {
        "norm_bias": True,
        "kernel": False,
        "kernels/0": False,
        "kept": False,
    }
    with pytest.raises(ValueError, match=r"parameter kernel does not say what it is; make it with"):
        decay_mask({"kernel": jnp.ones((2, 3))})


@pytest.mark.thorough("titans", "ttt_linear")
@pytest.mark.parametrize(
    "name", ["titans", "titans_mac", "titans_mag", "titans_mal", "ttt_linear", "ttt_mlp"]
)
def test_norms_and_biases_per_head_keep_their_values_in_100_empty_steps(name):
    titans = TitansConfig(
        num_heads=2, head_dim=8, chunk_size=4, qk_norm=True, output_norm=True, bias=True
    )
    swa = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    model = ModelConfig(
        mixers=(name,), vocab_size=8, model_dim=16, mlp_dim=8, attention=swa, titans=titans
    )
    mixer = LanguageModel(model, rngs=nnx.Rngs(0)).blocks[0].mixer
    params = jax.tree.map(jnp.ones_like, nnx.state(mixer))
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, decay_steps=1, weight_decay=0.1)
    optimizer = make_optimizer(config, steps=100)

    def step(_, carried):
        params, state = carried
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return optax.apply_updates(params, updates), state

    start = (params, optimizer.init(params))
    after = named_leaves(jax.jit(lambda x: jax.lax.fori_loop(0, 100, step, x)[0])(start))
    kept = {path for path, x in after.items() if np.all(np.asarray(x) == 1)}
    words = ("norm", "scale", "bias", "factor")
    assert kept == {path for path in after if any(word in path for word in words)}
    heads = {path for path in kept if after[path].ndim > 1}
    assert any(path.endswith("scale") for path in heads)
    assert any("biases/" in path for path in heads)
    assert any("/layers/" in f"/{path}" for path in after.keys() - kept)


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


@pytest.mark.thorough
def test_weight_decay_is_decoupled():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1, clip_norm=None)
    optimizer = make_optimizer(config, steps=10)
    params = {
        "kernel": parameter(jnp.full((2, 2), 3.0), "matrix"),
        "bias": parameter(jnp.full(2, 3.0), "bias"),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"][...], -0.5 * 0.1 * 3.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"][...], 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_norm_is_that_of_all_arrays_as_one_vector(dtype):
    rng = np.random.default_rng(0)
    shapes = ((), (3,), (20_000,), (2, 3), (90, 200), (3, 4, 1500), (0, 2))
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    together = np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])
    found = jax.jit(global_norm)({"some": arrays[:3], "others": arrays[3:]})
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.linalg.norm(together), rtol=1e-6)
    assert global_norm({}) == 0


def test_arrays_side_by_side_are_the_same_and_small_equal_ones_one():
    shapes = [(3,), (2, 3), (3,), (20_000,), (20_000,), (0,), (0,), (3,)]
    dtypes = [jnp.float32] * 7 + [jnp.bfloat16]
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=x), d) for x, d in zip(shapes, dtypes, strict=True)]
    tree = {"some": arrays[:3], "others": tuple(arrays[3:])}
    moved = jax.jit(joined)(tree)
    jax.tree.map(np.testing.assert_array_equal, moved, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), moved) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )
    for device, barriers in (("gpu", 2), ("cpu", 0)):  # Of (3,) in float32 and of (0,).
        with compiled_for(device):
            found = str(jax.make_jaxpr(side_by_side)(tree)).count("optimization_barrier")
        assert found == barriers


def test_first_update_is_adams():
    # After one step both moments are unbiased: the update is lr * g / (|g| + eps).
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.0, clip_norm=None)
    optimizer = make_optimizer(config, steps=10)
    params = {"bias": parameter(jnp.array([1.0, 2.0]), "bias")}
    grads = {"bias": parameter(jnp.array([1e-3, -40.0]), "bias")}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(updates["bias"][...], [-0.5, 0.5], rtol=1e-4)


@pytest.mark.by_default("10.0-1.0", "None-1.0")
@pytest.mark.parametrize(("clip_norm", "scale"), [(1.0, 1 / 5), (10.0, 1.0), (None, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(clip_norm, scale):
    # The first moment is (1 - beta1) times the gradient that AdamW saw.
    optimizer = make_optimizer(OptimizerConfig(clip_norm=clip_norm), steps=10)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}  # Norm 5.
    grads = {name: parameter(x, "bias") for name, x in grads.items()}
    _, state = optimizer.update(grads, optimizer.init(grads), grads)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(first_moment["a"][...], 0.1 * 3 * scale, rtol=1e-6)
    np.testing.assert_allclose(first_moment["b"][...], 0.1 * 4 * scale, rtol=1e-6)


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


@pytest.mark.parametrize("decay_fraction", [0.25, 1.0])
def test_learning_rate_is_stable_and_then_decays(decay_fraction):
    options = {"learning_rate": 2.0, "warmup_steps": 4, "final_fraction": 0.1}
    options |= {"schedule": "warmup_stable_decay", "decay_fraction": decay_fraction}
    schedule = learning_rate_schedule(OptimizerConfig(**options), steps=24)
    begin = 18 if decay_fraction == 0.25 else 4  # The warm-up comes first.
    for step in range(30):
        expected = 2.0 * (1 + 4 * min(step, 4) / 4) / 5
        if step >= begin:
            expected = 2.0 - 1.8 * min((step - begin) / (24 - begin), 1)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)


def test_a_constant_learning_rate_stays_after_the_warmup():
    config = OptimizerConfig(schedule="constant", learning_rate=2.0, warmup_steps=4)
    schedule = learning_rate_schedule(config, steps=24)
    np.testing.assert_allclose([schedule(step) for step in (4, 10, 100)], 2.0, rtol=1e-6)


MATRIX, BIAS = np.array([[3.0, -1.0], [2.0, 4.0], [0.5, 1.0]]), np.array([2.0, -2.0])


@pytest.mark.by_default("lion", "muon")
@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_the_first_step_is_the_published_one(name):
    config = OptimizerConfig(
        name=name,
        learning_rate=0.5,
        warmup_steps=0,
        schedule="constant",
        weight_decay=0.1,
        clip_norm=None,
    )
    optimizer = make_optimizer(config, steps=10)
    params = {
        "kernel": parameter(jnp.full((3, 2), 3.0), "matrix"),
        "embedding": parameter(jnp.full((3, 2), 3.0), "embedding"),
        "bias": parameter(jnp.full(2, 3.0), "bias"),
    }
    values = {"kernel": MATRIX, "embedding": MATRIX, "bias": BIAS}
    grads = jax.tree.map(lambda x: x, params)
    for key, value in values.items():
        grads[key] = grads[key].replace(jnp.asarray(value, jnp.float32))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    after = named_leaves(optax.apply_updates(params, updates))

    def direction(key):
        gradient = values[key]
        if name == "adafactor":  # Small ones are not factored; the first step forgets nothing.
            return gradient / np.abs(gradient)
        if name == "muon" and key == "kernel":
            left, _, right = np.linalg.svd(gradient, full_matrices=False)
            return 0.2 * np.sqrt(3) * left @ right
        return np.sign(gradient)  # Lion's, and Adam's first.

    for key in values:
        decay = 0.1 * 3.0 * (key != "bias")
        expected = 3.0 - 0.5 * (direction(key) + decay)
        # Five iterations of Newton and Schulz leave singular values from 0.7 to 1.2.
        atol = 0.06 if name == "muon" and key == "kernel" else 1e-4
        np.testing.assert_allclose(after[key], expected, atol=atol)


SCHEDULE_FREE = OptimizerConfig(name="schedule_free", schedule="constant", warmup_steps=0)


@pytest.mark.thorough
def test_schedule_free_weights_are_the_average_that_optax_evaluates():
    """The peer keeps the points where gradients are taken, and divides to find the average."""
    config = dataclasses.replace(SCHEDULE_FREE, learning_rate=0.05, clip_norm=None)
    ours = make_optimizer(config, steps=10)
    adamw = optax.adamw(0.05, b1=0.0, b2=0.95, weight_decay=0.1, mask=decay_mask)
    theirs = optax.contrib.schedule_free(adamw, 0.05, b1=0.9)
    average = points = {
        "kernel": parameter(jnp.asarray(MATRIX, jnp.float32), "matrix"),
        "bias": parameter(jnp.asarray(BIAS, jnp.float32), "bias"),
    }

    def gradient(weights):
        return jax.tree.map(lambda x: 2 * (x - 1), weights)

    ours_state, theirs_state = ours.init(average), theirs.init(points)
    for _ in range(20):
        grads = gradient(gradient_weights(average, ours_state))
        updates, ours_state = ours.update(grads, ours_state, average)
        average = optax.apply_updates(average, updates)
        updates, theirs_state = theirs.update(gradient(points), theirs_state, points)
        points = optax.apply_updates(points, updates)
    expected = optax.contrib.schedule_free_eval_params(theirs_state, points)
    for name, x in named_leaves(expected).items():
        np.testing.assert_allclose(named_leaves(average)[name], x, rtol=2e-6, atol=2e-6)
    moved = named_leaves(average)["kernel"] - MATRIX
    assert np.abs(moved).max() > 0.1  # And so the comparison says something.


def test_schedule_free_leaves_running_statistics_to_their_own_update():
    optimizer = make_optimizer(SCHEDULE_FREE, steps=10)
    params = {"w": parameter(jnp.ones(2), "scale"), "mean": parameter(jnp.ones(2), "statistic")}
    state = optimizer.init(params)
    params["mean"] = params["mean"].replace(jnp.full(2, 5.0))  # As a step's statistics do.
    grads = jax.tree.map(jnp.ones_like, params) | {"mean": params["mean"].replace(jnp.zeros(2))}
    updates, state = optimizer.update(grads, state, params)
    np.testing.assert_array_equal(updates["mean"][...], 0)
    np.testing.assert_array_equal(gradient_weights(params, state)["mean"][...], 5)
    assert np.all(updates["w"][...] < 0)


@pytest.mark.thorough
def test_the_moving_average_is_the_sum_that_its_decay_gives():
    config = OptimizerConfig(ema=0.5, learning_rate=0.1, warmup_steps=0, schedule="constant")
    optimizer = make_optimizer(config, steps=10)
    params = {
        "w": parameter(jnp.array([1.0, 2.0], jnp.bfloat16), "scale"),
        "mean": parameter(jnp.ones(2), "statistic"),
    }
    state, expected = optimizer.init(params), np.array([1.0, 2.0])
    for step in range(1, 15):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * np.asarray(params["w"][...], np.float64)
    average = ema_weights(params, named_leaves(state), ema_names(params, ema=config.ema))
    np.testing.assert_allclose(average["w"][...], expected, rtol=1e-5)
    assert average["w"][...].dtype == jnp.float32
    np.testing.assert_array_equal(average["mean"][...], params["mean"][...])
    with pytest.raises(ValueError, match="keeps no moving average"):
        ema_names(params, ema=None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "schedule_free"}, "schedule=cosine lowers the learning rate"),
        ({"ema": 1.0}, "ema=1.0 must lie between 0 and 1, 0 and 1 excluded"),
        ({"ema": 0.9, **vars(SCHEDULE_FREE)} | {"ema": 0.9}, "an average already; leave ema out"),
        (vars(SCHEDULE_FREE) | {"betas": (0.0, 0.95)}, "divides by the first; set it above 0"),
        (vars(SCHEDULE_FREE) | {"precision": "parameters"}, "set precision=float32"),
    ],
)
def test_averages_that_mean_nothing_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**changed)


AVERAGED = {
    "schedule_free": SCHEDULE_FREE,
    "ema": OptimizerConfig(ema=0.9, decay_steps=12),
}


@pytest.mark.parametrize("train", [(), (".*/mixer/.*",)], ids=["all", "some"])
@pytest.mark.parametrize("name", ["lion", "adafactor", "muon", *AVERAGED])
def test_every_optimisers_moments_lie_like_their_weights(name, train):
    experiment = get_config()
    config = AVERAGED[name] if name in AVERAGED else OptimizerConfig(name=name)
    optimizer = make_optimizer(config, steps=10)
    model, memory = experiment.model, experiment.training.memory
    graphdef = model_graph(model)
    state = jax.eval_shape(
        lambda: init_state(model, memory=memory, optimizer=optimizer, seed=0, train=train)
    )
    names, types = ("data", "fsdp", "model"), (AxisType.Auto,) * 3
    mesh = AbstractMesh((1, 2, 1), names, axis_types=types)
    layout = state_shardings(Partition(mesh), state, graphdef=graphdef)
    assert jax.tree.structure(layout.opt_state) == jax.tree.structure(state.opt_state)
    leaves = map(jax.tree.leaves, (state.opt_state, layout.opt_state))
    assert all(len(sharding.spec) <= x.ndim for x, sharding in zip(*leaves, strict=True))
    trained = named_leaves(trained_part(layout.params, train))
    weights, moments = (
        sum("fsdp" in str(x.spec) for x in jax.tree.leaves(tree))
        for tree in (trained, layout.opt_state)
    )
    assert weights > 5
    per_weight = {"adafactor": 0.9, "lion": 1, "muon": 1, "schedule_free": 2, "ema": 3}
    assert moments >= per_weight[name] * weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "adafactor", "muon", *AVERAGED])
def test_a_run_with_another_optimiser_learns_and_resumes_bit_for_bit(name, tmp_path):
    experiment = get_config()
    optimizer = AVERAGED[name] if name in AVERAGED else OptimizerConfig(name=name, decay_steps=12)
    optimizer = dataclasses.replace(optimizer, learning_rate=3e-3, warmup_steps=2)
    whole = dataclasses.replace(experiment, optimizer=optimizer, run_dir=str(tmp_path / "whole"))
    first, half = train_steps(whole, 12), dataclasses.replace(whole, run_dir=str(tmp_path / "half"))
    train_steps(half, 6)
    second = train_steps(half, 12)
    jax.tree.map(np.testing.assert_array_equal, first.state.params, second.state.params)
    jax.tree.map(np.testing.assert_array_equal, first.state.opt_state, second.state.opt_state)
    losses = [record["loss"] for record in read_records(tmp_path / "whole") if "loss" in record]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_evaluation_and_export_read_the_moving_average_of_a_run(tmp_path):
    experiment = get_config()
    config = dataclasses.replace(experiment.optimizer, ema=0.8)
    whole = dataclasses.replace(experiment, optimizer=config, run_dir=str(tmp_path / "run"))
    result = train_steps(whole, 10)
    state = result.state
    names = ema_names(state.params, ema=0.8)
    expected = named_leaves(ema_weights(state.params, named_leaves(state.opt_state), names))
    trained, averaged = (
        load_run(tmp_path / "run", weights=weights) for weights in ("trained", "ema")
    )
    assert_equal(named_leaves(averaged.params), expected)
    assert_equal(named_leaves(trained.params), named_leaves(state.params))
    assert any(
        np.any(x != y)
        for x, y in zip(*map(jax.tree.leaves, (trained.params, averaged.params)), strict=True)
    )
    assert result.results["validation"]["ema_loss"] != result.results["validation"]["loss"]
    for weights in ("trained", "ema"):
        found = evaluate(tmp_path / "run", ["recall"], limit=1, weights=weights)["recall"].record
        assert found["provenance"]["checkpoint"].get("weights", "trained") == weights
    export_run(tmp_path / "run", tmp_path / "exported", weights="ema")
    exported = read_folder(tmp_path / "exported")[1].named()
    assert_equal({name: exported[f"params/{name}"] for name in expected}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["all", "none"])
def test_a_memory_starts_from_the_first_table_of_the_weights_that_are_read(kept, tmp_path):
    experiment = get_config()
    rule = SDM(num_subkeys=4, value_dim=8, num_writes=2, num_reads=2, first_table="learned")
    fast_weight = dataclasses.replace(experiment.model.fast_weight, rule=rule)
    training = experiment.training
    memory = dataclasses.replace(training.memory, groups=training.batch_size, lifetime="batch")
    experiment = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, fast_weight=fast_weight),
        optimizer=dataclasses.replace(experiment.optimizer, ema=0.8),
        training=dataclasses.replace(training, memory=memory, steps=3),
        checkpoint=dataclasses.replace(experiment.checkpoint, memories=kept),
        run_dir=str(tmp_path / "run"),
    )

    def distance(model, memories):
        """The largest distance of a memory's values from what the model has learned of them."""
        (name,) = memories
        first = model.blocks[model.layer_names.index(name)].memory.first_values[...]
        return float(jnp.max(jnp.abs(memories[name].values - first[None])))

    result = train(
        experiment,
        validate=lambda model, memories: {"loss": distance(model, memories)},
        stream=io.StringIO(),
    )
    assert result.results["validation"] == {"loss": 0.0, "ema_loss": 0.0}
    runs = [load_run(tmp_path / "run", weights=weights) for weights in ("trained", "ema")]
    assert [distance(run.model, run.memory) for run in runs] == [0.0, 0.0]
    assert distance(runs[0].model, runs[1].memory) > 0


@pytest.mark.thorough
def test_a_run_without_an_average_says_so(unbroken):
    with pytest.raises(ValueError, match=r"optimizer.ema is None.*use weights=trained"):
        load_run(unbroken.directory, weights="ema")


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)


def train_steps(experiment, steps):
    training = dataclasses.replace(experiment.training, steps=steps)
    return train(dataclasses.replace(experiment, training=training), stream=io.StringIO())
