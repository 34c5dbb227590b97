"""Full attention windowed to a window in some steps: the draw, the branches, the whole step."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from fwpkm_jax.run.train import train
from fwpkm_jax.training.random_window import draw_window, random_window
from fwpkm_jax.training.state import MemoryConfig, init_state, model_graph
from fwpkm_jax.training.step import make_train_step
from tests.training.test_step import sample_batch
from tests.training.tiny_config import get_config

FULL = dataclasses.replace(get_config().model, mixers=("attention",), memory_layers=(0,), window=3)
WINDOWED = dataclasses.replace(FULL, mixers=("swa",))
BARE, BARE_WINDOWED = (dataclasses.replace(model, memory_layers=()) for model in (FULL, WINDOWED))
MEMORY = MemoryConfig(groups=1, lifetime="carried")


def make_step(model, *, probability=0.0):
    return make_train_step(
        model_graph(model),
        optax.sgd(0.1),
        schedule=optax.constant_schedule(0.1),
        micro_batches=2,
        memory=MEMORY,
        windowed=random_window(model, probability),
    )


@functools.partial(jax.jit, static_argnums=0)
def start(model=FULL):
    return init_state(model, memory=MEMORY, optimizer=optax.sgd(0.1), seed=0)


def assert_same(actual, expected):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected
    )


@pytest.mark.slow
def test_each_step_is_wholly_the_one_or_the_other_by_its_draw():
    """Four steps at probability 1/2, each against the two models' own steps; micro-batches share
    the draw."""
    mixed, full, windowed = (
        make_step(BARE, probability=0.5),
        make_step(BARE),
        make_step(BARE_WINDOWED),
    )
    state, drawn = start(BARE), []
    for seed in range(4):
        before = jax.tree.map(np.asarray, state._replace(rng=jax.random.key_data(state.rng)))

        def again(before=before):
            return before._replace(rng=jax.random.wrap_key_data(before.rng))

        in_window = bool(draw_window(state.rng, state.step, 0.5))
        state, metrics = mixed(state, sample_batch(seed))
        expected, other = (windowed, full) if in_window else (full, windowed)
        same, same_metrics = expected(again(), sample_batch(seed))
        assert metrics.pop("windowed") == in_window
        assert_same(metrics, same_metrics)
        assert_same((state.params, state.memory), (same.params, same.memory))
        assert abs(other(again(), sample_batch(seed))[1]["loss"] - metrics["loss"]) > 1e-5
        drawn.append(in_window)
    assert set(drawn) == {True, False}


@pytest.mark.slow
def test_both_branches_are_compiled_once():
    drawn, never = (
        make_step(BARE, probability=p).lower(start(BARE), sample_batch()).as_text()
        for p in (0.9, 0.0)
    )
    # The optimiser has choices of its own, between devices.
    assert drawn.count("stablehlo.case") == never.count("stablehlo.case") + 1


def test_the_draw_depends_on_the_runs_stream_and_the_step_alone():
    rng = jax.random.key(3)
    draws = jax.vmap(lambda step: draw_window(rng, step, 0.9))(np.arange(2000))
    assert abs(np.mean(draws) - 0.9) < 0.02
    np.testing.assert_array_equal(draws[7], draw_window(rng, np.int32(7), 0.9))
    assert not np.array_equal(
        draws, jax.vmap(lambda step: draw_window(jax.random.key(4), step, 0.9))(np.arange(2000))
    )


def test_never_and_always_are_the_two_models():
    assert random_window(FULL, 0.0) is None
    always = random_window(FULL, 1.0)
    assert always is not None
    windowed = tuple(
        full.in_window(WINDOWED.window) or name
        for full, name in zip(FULL.mixer_configs, FULL.mixers, strict=True)
    )
    assert always.graphdef == model_graph(dataclasses.replace(FULL, mixers=windowed))
    assert windowed == tuple(
        window if window != full else name
        for window, full, name in zip(
            WINDOWED.mixer_configs, FULL.mixer_configs, FULL.mixers, strict=True
        )
    )


def test_a_model_without_full_attention_is_refused():
    with pytest.raises(ValueError, match=r"window_probability=0\.5 limits full attention"):
        random_window(WINDOWED, 0.5)


@pytest.mark.slow
def test_a_run_records_which_steps_were_limited(tmp_path):
    experiment = get_config()
    training = dataclasses.replace(experiment.training, steps=6, window_probability=0.5)
    result = train(
        dataclasses.replace(
            experiment, model=BARE, training=training, run_dir=str(tmp_path / "run")
        )
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    recorded = [line.split('"windowed": ')[1][:3] for line in lines if '"windowed"' in line]
    assert result.step == 6
    assert set(recorded) == {"0.0", "1.0"}
