"""The program of multi-query associative recall, on the smallest tasks."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from lab.comparison import mqar, mqar_decoder, mqar_training
from lab.comparison.mqar_decoder import Decoder, Layout
from lab.comparison.mqar_tables import label_places
from lab.comparison.mqar_tasks import Task, cell_of, distinct, documents
from tests.benchmarks.programs import result_lines, run


@pytest.mark.parametrize("updates", [0, 2])
def test_each_question_is_answered_by_the_last_value_of_its_key(updates):
    task = Task(pairs=4, length=32, updates=updates, random_filler=updates > 0, vocabulary=64)
    made = documents(task, 50, split="train", seed=3)
    context = 2 * (4 + updates)
    for tokens, positions, labels in zip(*made, strict=True):
        stated = dict(zip(tokens[0:context:2], tokens[1:context:2], strict=True))
        assert len(set(tokens[:8:2])) == len(set(positions)) == 4
        assert min(positions) >= context
        assert all(0 < key < 32 <= value < 64 for key, value in stated.items())
        np.testing.assert_array_equal(labels, [stated[token] for token in tokens[positions]])
        changed = [
            key
            for key in tokens[8:context:2]
            if stated[key] != dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))[key]
        ]
        assert len(changed) == updates
    again = documents(task, 50, split="train", seed=3)
    other = documents(task, 50, split="test", seed=3)
    np.testing.assert_array_equal(made.tokens, again.tokens)
    assert (made.tokens[:, :8] != other.tokens[:, :8]).any(axis=1).all()


def test_stacked_questions_have_a_key_and_no_value():
    made = documents(Task(pairs=3, length=6, stacked=True, vocabulary=32), 9, split="valid", seed=0)
    assert made.tokens.shape == (9, 6, 2)
    assert (made.tokens[:, 3:, 1] == -1).all()
    for tokens, labels in zip(made.tokens, made.labels, strict=True):
        stated = dict(tokens[:3].tolist())
        assert [stated[key] for key in tokens[3:, 0]] == labels.tolist()


def test_gaps_of_questions_follow_the_power_law():
    made = documents(Task(pairs=1, length=12, vocabulary=32), 40_000, split="train", seed=0)
    counts = np.bincount((made.positions[:, 0] - 2) // 2, minlength=5)
    expected = np.arange(1, 6) ** -0.99
    np.testing.assert_allclose(counts / 40_000, expected / expected.sum(), atol=0.01)
    drawn = distinct(np.random.default_rng(0), 30_000, 3, 5, 9)
    assert np.ptp(np.unique(drawn, axis=0, return_counts=True)[1]) < 250  # 24 rows of 1,250.
    assert len(np.unique(drawn, axis=0)) == 24


def test_settings_are_the_published_ones():
    one = cell_of("cell", pairs=4, length=64)
    assert (one.batch_size, one.epochs, one.train[0].documents) == (512, 64, 100_000)
    assert one.rates == (1e-4, 4.64e-4, 2.15e-3, 1e-2)
    assert cell_of("cell", pairs=64, length=512).batch_size == 128
    stacked = cell_of("stacked", pairs=0, length=0)
    assert [part.task.pairs for part in stacked.test] == [4, 8, 16, 32, 64, 128, 256]
    assert sum(part.documents for part in stacked.train) == 180_000
    assert stacked.rates == (1e-3, 3.16e-3, 1e-2, 3.16e-2)
    assert {part.task.updates for part in cell_of("reassigned", pairs=0, length=0).train} == {4}
    with pytest.raises(ValueError, match=r"length=14 is too short for pairs=4.*at least 16"):
        cell_of("cell", pairs=4, length=14)
    with pytest.raises(ValueError, match=r"pairs=40 .*vocabulary=64"):
        Task(pairs=40, length=400, vocabulary=64)


def test_state_counts_convolutions_and_waiting_tokens():
    layout = Layout(vocabulary=16, width=8, heads=2, chunk=4)
    convolution = 4 * 2 * 8
    matrix = 4 * 2 * 4 * 4
    assert mqar_decoder.state_bytes("deltanet", layout, length=32) == (convolution + matrix,) * 2
    wide = replace(layout, head_dim=6)
    assert mqar_decoder.state_bytes("deltanet", wide, length=32)[0] == convolution + 4 * 2 * 6 * 6
    published = mqar_decoder.state_bytes("attention_positions", layout, length=32)[0]
    assert published >= 2 * 4 * 32 * 2 * 8
    total, touched = mqar_decoder.state_bytes("fwpkm_16", layout, length=32)
    keys, table, chosen = 4 * 16 * 8, 4 * 16 * 16 * 8, 4 * 8 * 8
    waiting = total - convolution - keys - table
    assert waiting >= 4 * 5 * (8 + 8)  # A chunk and the token that its last one is paired with.
    assert touched == total - table + chosen
    # Two tables of SDM: 3 x 3 slots of 6 numbers, of which 3 are written and 3 read.
    table, chosen = 4 * 2 * 9 * 6, 4 * 2 * (3 + 3) * 6
    expected = convolution + table, convolution + chosen
    assert mqar_decoder.state_bytes("sdm_heads", wide, length=32) == expected


@pytest.mark.parametrize("name", mqar_decoder.NAMES)
def test_no_answer_depends_on_a_later_token_and_each_depends_on_the_pairs(name):
    layout = Layout(vocabulary=32, width=16, heads=2, chunk=4)
    model = Decoder(name, layout, length=16, init_std=0.3, rngs=nnx.Rngs(0))
    memory = model.init_memory(jax.random.key(0))
    made = documents(Task(pairs=2, length=16, vocabulary=32), 3, split="train", seed=0)
    first = made.positions.min(axis=1, keepdims=True)

    @jax.jit
    def answers(tokens):
        return model.logits(model(tokens, first, memory))

    whole = answers(made.tokens)
    later = np.where(np.arange(16) > first, 31, made.tokens)
    np.testing.assert_allclose(answers(later), whole, atol=1e-5)
    stated = made.tokens.copy()
    stated[:, 1] = np.where(stated[:, 1] == 20, 21, 20)
    assert np.abs(answers(stated) - whole).max() > 1e-4


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, capsys):
    options = [
        *("--memories", "deltanet", "--rates", 1e-2, 1e-3, "--seeds", 0, 1, "--setting", "cell"),
        *("--pairs", 2, "--length", 16, "--width", 16, "--heads", 2, "--chunk", 4),
        *("--batch-size", 4, "--rows", 2, "--documents", 17, "--tested", 3, "--threshold", 1.0),
        *("--validations", 2),
    ]
    once = ("--rates", 1e-2, "--seeds", 0, "--epochs", 2)
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    run("lab.comparison.mqar", *options, "--epochs", 2, "--out", whole)
    with pytest.MonkeyPatch.context() as patch:
        save = mqar_training._save

        def save_and_stop(*arguments):
            save(*arguments)
            raise KeyboardInterrupt

        patch.setattr(mqar_training, "_save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run("lab.comparison.mqar", *options, *once, "--out", stopped)
    assert len(list(tmp_path.glob("*.npz"))) == 1
    assert not stopped.exists()
    run("lab.comparison.mqar", *options, *once, "--out", stopped)
    assert not list(tmp_path.glob("*.npz"))
    rows, (continued,) = result_lines(whole), result_lines(stopped)
    passing = ("cpu_seconds", "environment")
    assert {k: v for k, v in rows[0].items() if k not in passing} == {
        k: v for k, v in continued.items() if k not in passing
    }
    # Both rates from the first seed; from the other seed the one chosen.
    assert [(row["rate"], row["seed"]) for row in rows[:2]] == [(1e-2, 0), (1e-3, 0)]
    assert (rows[2]["rate"], rows[2]["seed"]) == (mqar.best_rate(rows[:2]), 1)
    # 17 documents are 4 batches of 4; a validation comes after every second one.
    assert [step for step, *_ in rows[0]["curve"]] == [2, 4, 6, 8]
    run("lab.comparison.mqar", *options, "--epochs", 2, "--out", whole)
    assert result_lines(whole) == rows
    with pytest.raises(ValueError, match=r"rows=3 must divide batch_size=4"):
        run("lab.comparison.mqar", *options, "--rows", 3, "--epochs", 2, "--out", tmp_path / "a")
    with pytest.raises(ValueError, match=r"17 documents for 2 .* less than a batch of 16"):
        run("lab.comparison.mqar", *options, "--batch-size", 16, "--out", tmp_path / "b")
    drawn = ("--mqar", whole, "--state-tracking", "none", "--images", tmp_path)
    capsys.readouterr()
    run("lab.comparison.tables", *drawn)
    assert "| `deltanet` |" in capsys.readouterr().out
    assert (tmp_path / "comparison_mqar.png").stat().st_size > 0


@pytest.mark.parametrize("setting", ["mixed", "stacked", "reassigned"])
def test_other_settings_train_all_their_parts(setting, tmp_path, monkeypatch):
    def small(setting, **_):
        found = cell_of(setting, pairs=0, length=0)
        return found._replace(train=found.train[:2], test=found.test[:2])

    monkeypatch.setattr(mqar, "cell_of", small)
    options = ("--memories", "linear_attention", "--seeds", 0, "--rates", 1e-2, "--width", 8)
    sizes = ("--batch-size", 2, "--rows", 2, "--documents", 2, "--tested", 2, "--epochs", 1)
    out = tmp_path / "m.jsonl"
    run("lab.comparison.mqar", "--setting", setting, *options, *sizes, "--out", out)
    (row,) = result_lines(out)
    assert row["settings"]["setting"] == setting
    assert row["steps"] == 2
    assert len(row["test"]) == 2


def test_pairs_of_documents_are_chosen_from_those_of_the_setting():
    chosen = mqar.cell(mqar.Options(setting="stacked", train_pairs=(4, 64), test_pairs=(64,)))
    assert [part.task.pairs for part in chosen.train] == [4, 64]
    assert [part.task.pairs for part in chosen.test] == [64]
    with pytest.raises(
        SystemExit, match=r"--train-pairs: \[5\] are not among \[4, 8, 16, 32, 64\]"
    ):
        run("lab.comparison.mqar", "--setting", "stacked", "--train-pairs", 4, 5)
    with pytest.raises(SystemExit, match=r"--test-pairs: \[512\] are not among"):
        run("lab.comparison.mqar", "--setting", "stacked", "--test-pairs", 512)


def test_an_epoch_goes_through_its_parts_in_turn():
    layout = Layout(vocabulary=32, width=8, heads=2, chunk=4)
    training = mqar_training.Training("deltanet", layout, batch_size=2, rows=2, length=8)
    tasks = [Task(pairs=pairs, length=8, vocabulary=32) for pairs in (1, 2, 1)]
    parts = [documents(task, 9, split="train", seed=n) for n, task in enumerate(tasks)]
    pieces = training.blocks(parts, 2)
    assert [len(piece) for piece in pieces] == [3, 3]
    flat = [block for piece in pieces for block in piece]
    for number, part in enumerate(parts):  # The ninth document fills no batch.
        both = np.concatenate([block.tokens for block in flat[2 * number : 2 * number + 2]])
        np.testing.assert_array_equal(both.reshape(8, -1), part.tokens[:8])


@pytest.mark.slow
def test_decays_begin_and_the_rate_rises_as_options_say(tmp_path, capsys):
    out = tmp_path / "m.jsonl"
    sizes = ("--pairs", 2, "--length", 8, "--width", 8, "--heads", 2)
    small = (*sizes, "--batch-size", 2, "--rows", 2)
    short = ("--documents", 2, "--tested", 2, "--epochs", 1, "--seeds", 0, "--rates", 1e-2)
    options = ("--memories", "gated_deltanet", *small, *short, "--out", out)
    run("lab.comparison.mqar", *options, "--decay-start", "constant")
    run("lab.comparison.mqar", *options)
    run("lab.comparison.mqar", *options, "--warmup", 9, "--tied-start", "--head-dim", 6)
    first, second, slow = result_lines(out)
    assert first["settings"] == second["settings"] | {"decay_start": "constant"}
    assert slow["settings"] == second["settings"] | {
        "warmup": 9,
        "tied_start": True,
        "head_dim": 6,
    }
    assert first["loss"] != second["loss"]
    none = tmp_path / "none"
    run("lab.comparison.tables", "--mqar", out, "--state-tracking", none, "--images", tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("decays start constant") == 1
    assert shown.count("9 updates of warm-up, keys begin as queries") == 1
    assert shown.count("| `gated_deltanet` |") == 3


def test_a_warm_up_raises_the_rate_update_by_update():
    layout = Layout(vocabulary=32, width=8, heads=2, chunk=4)
    made = documents(Task(pairs=1, length=8, vocabulary=32), 2, split="train", seed=0)
    block = type(made)(*(leaf[None] for leaf in made))

    def updated(warmup, *rates):
        training = mqar_training.Training(
            "linear_attention", layout, batch_size=2, rows=2, length=8, warmup=warmup
        )
        state, frozen = training.start(0)
        for rate in rates:
            state, _ = training.train(state, frozen, [block], rate=rate, seed=0)
        return jax.tree.leaves(state.params)

    rising = updated(4, *[4e-2] * 5)
    for one, other in zip(rising, updated(0, 1e-2, 2e-2, 3e-2, 4e-2, 4e-2), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("name", ["titans", "lact", "ttt_linear"])
def test_a_tied_start_changes_the_map_to_keys_only(name):
    layout = Layout(vocabulary=64, width=16, heads=2, chunk=4, stacked=True)
    drawn, tied = (
        Decoder(name, one, length=12, rngs=nnx.Rngs(0))
        for one in (layout, replace(layout, tied_start=True))
    )
    pairs = zip(
        nnx.to_flat_state(nnx.state(drawn)), nnx.to_flat_state(nnx.state(tied)), strict=True
    )
    changed = [path for (path, x), (_, y) in pairs if not np.array_equal(x[...], y[...])]
    assert len(changed) == 1
    layer: Any = tied.layers[0]
    if name == "lact":
        query, key, _ = np.split(np.asarray(layer.qkv_proj.kernel[...]), 3, axis=1)
    else:
        query, key = layer.query_proj.kernel[...], layer.key_proj.kernel[...]
    np.testing.assert_array_equal(query, key)
    assert np.std(key) > 0


@pytest.mark.parametrize("name", ["fwpkm_8", "fwmlp", "attention"])
def test_a_memory_without_a_tied_start_is_named_before_any_is_trained(name, tmp_path):
    out = tmp_path / "lines.jsonl"
    with pytest.raises(SystemExit, match=f"--memories {name}: tied_start is for matrix memories"):
        run("lab.comparison.mqar", "--memories", "deltanet", name, "--tied-start", "--out", out)
    assert not out.exists()


def test_among_equal_rates_the_faster_is_best():
    rows = [
        {"rate": 1e-2, "valid": 0.99, "steps": 30},
        {"rate": 1e-3, "valid": 0.99, "steps": 20},
        {"rate": 1e-4, "valid": 0.50, "steps": 10},
    ]
    assert mqar.best_rate(rows) == 1e-3


def test_names_of_points_stand_apart_and_beside_their_points():
    points = {"a": (8.0, 1.0), "b": (8.1, 0.99), "c": (8.2, 0.5), "d": (64.0, 0.995)}
    places = label_places(points, gap=0.1)
    assert places["a"] == (8.2, 1.0)
    assert places["b"] == (8.2, 0.9)
    assert places["c"] == (8.2, 0.5)
    assert places["d"] == (64.0, 0.995)
