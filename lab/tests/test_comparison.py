"""The programs behind docs/measurements/comparison.md, on the smallest tasks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from lab.comparison import small_decoders, state_tracking
from lab.comparison.arithmetic import TOKENS, ArithmeticSource
from tests.benchmarks.programs import run

pytestmark = pytest.mark.thorough


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


@pytest.mark.parametrize("task", ["parity", "brackets", "arithmetic"])
def test_state_tracking_runs_and_is_drawn(task, tmp_path, capsys):
    out = tmp_path / "s.jsonl"
    more = () if task == "parity" else ("--every-value",)
    options = (
        *("--rules", "deltanet+", "--groups", task, "--seeds", 0, "--out", out),
        *("--length", 5, "--ends", 5, 9, "--steps", 2, "--batch-size", 2, "--documents", 2),
        *("--learning-rate", 1e-2, "--heads", 1, "--head-dim", 8, "--width", 16),
        *("--layers", 2, "--weight-decay", 0.1),
    )
    run("lab.comparison.state_tracking", *options, "--start-token", "--convolution", *more)
    run("lab.comparison.state_tracking", *options, "--start-token", "--convolution", *more)
    (line,) = out.read_text(encoding="utf-8").splitlines()
    row = json.loads(line)
    assert [(span["above"], span["up_to"]) for span in row["spans"]] == [(0, 5), (5, 9)]
    assert row["settings"]["start_token"]
    assert row["settings"]["every_value"] == bool(more)
    assert row["state_bytes"] == 2 * 4 * 8 * 8
    assert len(row["curve"]) == 2
    drawn = ("--mqar", "none", "--images", tmp_path)
    run("lab.comparison.tables", "--state-tracking", out, *drawn)
    shown = capsys.readouterr().out
    assert "| `deltanet+` |" in shown
    part = {"brackets": "bracket"}.get(task, "number")
    assert (f", a label at every {part}" in shown) == bool(more)
    assert (tmp_path / "comparison_states.png").stat().st_size > 0


@pytest.mark.parametrize("brackets", [False, True])
def test_arithmetic_is_labelled_with_its_value_at_the_first_equals_sign(brackets):
    source = ArithmeticSource(brackets=brackets, length=21, split="train", seed=1)
    lengths = set()
    for index in range(200):
        document = source[index]
        (end,) = np.flatnonzero(document["loss_weight"])
        text = [TOKENS[token] for token in document["tokens"]]
        assert text.index("=") == end
        assert ("(" in text) == brackets
        assert document["labels"][end] == eval(" ".join(text[:end])) % 5
        lengths.add(int(end))
    assert lengths == set(range(5, 22, 4) if brackets else range(3, 22, 2))
    with pytest.raises(ValueError, match="length=2 is too short"):
        ArithmeticSource(brackets=brackets, length=2, split="train", seed=1)


def test_every_number_of_a_training_expression_can_be_labelled_with_the_value_so_far():
    options = {"brackets": False, "length": 21, "split": "train", "seed": 1}
    plain = ArithmeticSource(**options)
    source = ArithmeticSource(every_value=True, **options)
    for index in range(50):
        document, same = source[index], plain[index]
        np.testing.assert_array_equal(document["tokens"], same["tokens"])
        text = [TOKENS[token] for token in document["tokens"]]
        end = text.index("=")
        np.testing.assert_array_equal(
            np.flatnonzero(document["loss_weight"]), [*range(0, end, 2), end]
        )
        for position in range(0, end, 2):
            value = eval(" ".join(text[: position + 1])) % 5
            assert document["labels"][position] == value
        assert document["labels"][end] == same["labels"][end]


def test_every_pair_of_brackets_can_be_labelled_with_its_value():
    options = {"brackets": True, "length": 21, "split": "train", "seed": 1}
    source, plain = ArithmeticSource(every_value=True, **options), ArithmeticSource(**options)
    for index in range(50):
        document, same = source[index], plain[index]
        np.testing.assert_array_equal(document["tokens"], same["tokens"])
        text = [TOKENS[token] for token in document["tokens"]]
        end = text.index("=")
        places = [place for place, token in enumerate(text) if token == ")"]
        np.testing.assert_array_equal(np.flatnonzero(document["loss_weight"]), [*places, end])
        assert document["labels"][places[-1]] == document["labels"][end] == same["labels"][end]
        first = places[0]  # The first to close holds no other.
        assert document["labels"][first] == eval("".join(text[first - 4 : first + 1])) % 5


def test_every_value_is_refused_for_groups():
    with pytest.raises(ValueError, match=r"for arithmetic and brackets, not for s3.* leave it out"):
        state_tracking.source_of("s3", "train", 9, 0, every_value=True)


def test_delta_steps_are_those_of_deltaproduct(tmp_path, capsys):
    options = (
        *(
            "--rules",
            "deltaproduct+",
            "--groups",
            "s5",
            "--seeds",
            0,
            "--out",
            tmp_path / "s.jsonl",
        ),
        *("--length", 4, "--ends", 4, 8, "--steps", 2, "--documents", 2),
    )
    for steps in (2, 4):
        run("lab.comparison.state_tracking", *options, "--delta-steps", steps)
    lines = map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())
    assert [line["settings"]["delta_steps"] for line in lines] == [2, 4]
    sizes = [
        state_tracking.decoder("deltaproduct+", state_tracking.Options(delta_steps=steps))
        .matrix.rules[0]
        .num_steps
        for steps in (2, 4)
    ]
    assert sizes == [2, 4]
    drawn = ("--mqar", "none", "--images", tmp_path)
    run("lab.comparison.tables", "--state-tracking", tmp_path / "s.jsonl", *drawn)
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
