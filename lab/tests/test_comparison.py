"""The programs behind docs/measurements/comparison.md, on the smallest tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from lab.comparison import small_decoders, state_tracking, trainer
from tests.benchmarks.programs import result_lines, run


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2", "gated_rfa", "mlstm", "gla"])
def test_a_learned_decay_starts_at_almost_none(name):
    config = state_tracking.decoder(name, state_tracking.Options())
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    mixer, x = model.blocks[0].mixer, jax.random.normal(jax.random.key(0), (2, 6, config.model_dim))

    def least_kept():
        return float(jnp.exp(mixer.rule.gates(mixer._gate_inputs(x))[0]).min())

    assert least_kept() < 0.99
    nnx.update(model, small_decoders.without_decay(nnx.state(model), config))
    # The projection adds to the bias, which alone keeps 399 of 400.
    assert least_kept() > 0.98


def test_state_tracking_runs_and_is_drawn(tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    options = (
        *("--rules", "deltanet+", "--groups", "parity", "--seeds", 0, "--out", out),
        *("--length", 5, "--ends", 5, 9, "--steps", 2, "--batch-size", 2, "--documents", 2),
        *("--learning-rate", 1e-2, "--heads", 1, "--head-dim", 8, "--width", 16),
        *("--layers", 2, "--weight-decay", 0.1, "--start-token", "--convolution"),
    )
    for _ in range(2):
        run("lab.comparison.state_tracking", *options)
    (row,) = result_lines(out)
    assert [(span["above"], span["up_to"]) for span in row["spans"]] == [(0, 5), (5, 9)]
    assert row["settings"]["start_token"]
    assert row["state_bytes"] == 2 * 4 * 8 * 8
    assert len(row["curve"]) == 2
    drawn = ("--mqar", "none", "--images", tmp_path)
    run("lab.comparison.tables", "--state-tracking", out, *drawn)
    assert "| `deltanet+` |" in capsys.readouterr().out
    assert (tmp_path / "comparison_states.png").stat().st_size > 0


def test_fwpkm_has_a_table_of_as_many_numbers_as_the_heads_of_sdm(tmp_path):
    out = tmp_path / "s.jsonl"
    few = ("--groups", "parity", "--seeds", 0, "--length", 3, "--ends", 3, "--steps", 2)
    few += ("--batch-size", 2, "--documents", 2, "--heads", 2, "--head-dim", 16)
    run("lab.comparison.state_tracking", "--rules", "fwpkm", "sdm_heads", *few, "--out", out)
    fwpkm, heads = result_lines(out)
    keys = 2 * 8 * (2 * 16 // 2)
    assert fwpkm["state_bytes"] - 4 * keys == heads["state_bytes"] == 2 * 4 * 8**2 * 16
    assert fwpkm["settings"] == heads["settings"]


def test_one_call_of_many_updates_equals_gradient_descent_written_out():
    def loss(params, fixed, batch):
        return jnp.mean((batch["x"] @ params["w"] + fixed - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(4, 3)).astype("f"), "y": rng.normal(size=4).astype("f")}
        for _ in range(5)
    ]
    weights = jnp.ones(3)
    for batch in batches:
        weights = weights - 0.2 * jax.grad(lambda w, batch=batch: loss({"w": w}, 1.0, batch))(
            weights
        )
    for rows, size in ((None, 2), (2, 5), (1, 1)):
        own = trainer.Trainer(loss, optax.sgd(0.1), rows=rows)
        state, losses = own.train(
            own.start({"w": jnp.ones(3)}), 1.0, trainer.stacked(batches, size), seed=0, rate=2.0
        )
        np.testing.assert_allclose(state.params["w"], weights, rtol=1e-5)
        assert int(state.step) == len(losses) == 5
        assert losses[0] == pytest.approx(float(loss({"w": jnp.ones(3)}, 1.0, batches[0])))


def test_what_is_drawn_differs_by_update_and_seed_and_not_by_rows():
    def draw(batch, rng):
        return batch + jax.random.normal(rng, batch.shape)

    def losses(rows, seed):
        own = trainer.Trainer(
            lambda p, _, batch: p * jnp.mean(batch), optax.sgd(0.0), rows=rows, draw=draw
        )
        return own.train(own.start(jnp.ones(())), None, [np.zeros((3, 4))], seed=seed)[1]

    first = losses(None, 0)
    assert len({*first.tolist()}) == 3
    np.testing.assert_allclose(losses(2, 0), first, rtol=1e-6)
    assert (losses(None, 1) != first).all()


def test_delta_steps_are_those_of_deltaproduct(tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    options = (
        *("--rules", "deltaproduct+", "--groups", "s5", "--seeds", 0, "--out", out),
        *("--length", 4, "--ends", 4, 8, "--steps", 2, "--documents", 2),
    )
    for steps in (2, 4):
        run("lab.comparison.state_tracking", *options, "--delta-steps", steps)
    lines = result_lines(out)
    assert [line["settings"]["delta_steps"] for line in lines] == [2, 4]
    sizes = [
        state_tracking.decoder("deltaproduct+", state_tracking.Options(delta_steps=steps))
        .matrix.rules[0]
        .num_steps
        for steps in (2, 4)
    ]
    assert sizes == [2, 4]
    drawn = ("--mqar", "none", "--images", tmp_path)
    run("lab.comparison.tables", "--state-tracking", out, *drawn)
    assert ", 4 steps of DeltaProduct per token" in capsys.readouterr().out


def test_a_start_token_has_no_label_and_moves_no_position():
    options = state_tracking.Options(start_token=True, ends=(3, 6), documents=4)
    ids = state_tracking.num_ids("mod3", options)
    source = state_tracking.source_of("mod3", "valid", 6, 0)
    asked = state_tracking.batch(source, 0, 4, ids - 1)
    assert (asked["tokens"][:, 0] == ids - 1).all()
    assert (asked["weights"] == [0, 1, 1, 1, 1, 1, 1]).all()
    plain = state_tracking.batch(source, 0, 4)
    np.testing.assert_array_equal(asked["tokens"][:, 1:], plain["tokens"])

    def right(batch):
        return np.broadcast_to(np.arange(7) < 4, batch["tokens"].shape)  # The start and three more.

    trained = small_decoders.Trained(right, 0.0, [], 0)
    shares = [span["accuracy"] for span in state_tracking.spans(trained, "mod3", options, 0)]
    assert shares == [1.0, 0.0]


def test_delta_rules_are_tried_with_strengths_up_to_one_and_two():
    rules = state_tracking.RULES
    doubled = {name for name in rules if name.endswith("+")}
    assert {"deltanet+", "gated_deltanet+", "deltaproduct+"} <= doubled
    for name in doubled:
        assert rules[name].negative_eigenvalues
        assert not rules[name.rstrip("+")].negative_eigenvalues
