"""Memories and low-rank updates put into a trained model: it says the same, frozen parts stay."""

import dataclasses
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.config import read_experiment
from fwpkm_jax.data import TextData
from fwpkm_jax.interchange import Weights, start_run
from fwpkm_jax.interchange.weights import abstract_weights
from fwpkm_jax.layers.experts import ExpertsConfig
from fwpkm_jax.run import load_run, setup
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.checkpoint import Checkpoints
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError
from fwpkm_jax.training.optimizer import OptimizerConfig
from fwpkm_jax.training.state import MemoryConfig, named_leaves
from fwpkm_jax.training.trained import describe_trained
from tests.training.tiny_config import get_config

ONLY_MEMORY = ".*/memory/.*"
NEW = (ONLY_MEMORY, ".*/lora_[ab]")
UPDATES = ("--model.lora.maps", r"blocks/\d+/.*/(q|down)_proj", "--model.lora.rank", "2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of a model without memories, one MLP of which is a mixture of experts."""
    experiment = get_config()
    experts = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8, shared_dim=8, balance_weight=0.1)
    model = dataclasses.replace(
        experiment.model, memory_layers=(), expert_layers=(1,), experts=experts
    )
    run_dir = tmp_path_factory.mktemp("retrofit") / "base"
    training = dataclasses.replace(
        experiment.training, steps=2, memory=MemoryConfig(lifetime="batch")
    )
    experiment = dataclasses.replace(
        experiment, model=model, training=training, run_dir=str(run_dir)
    )
    rng = np.random.default_rng(0)
    like = abstract_weights(model)
    arrays = {n: rng.normal(0, 0.3, x.shape).astype(x.dtype) for n, x in like.named().items()}
    start_run(experiment, like.replaced(arrays))
    return run_dir


def retrofit(base, *options):
    """The experiment of a command line that puts a memory into the base's layer 1."""
    run_dir = base.parent / "new"
    command = ["--base", str(base), "--run_dir", str(run_dir), "--model.memory_layers", "1"]
    return parse_command_line([*command, *options], default="recall")


@pytest.fixture(scope="module")
def trained(base):
    """Two steps that train only what is new; the run's directory and its printed lines."""
    stream = io.StringIO()
    result = train(retrofit(base, *UPDATES, "--optimizer.train", *NEW), stream=stream)
    assert result.status == "finished"
    return base.parent / "new", stream.getvalue(), result.state


@pytest.mark.slow
def test_the_command_of_the_page_on_sessions_trains_the_memory_alone(tmp_path):
    page = (Path(__file__).parents[2] / "docs/howto/sessions.md").read_text()
    command = re.search(r"```shell\nfwpkm train (.*?)```", page, re.DOTALL)[1]
    answer = {"question": "Where did Bo sit?", "answer": " mat"}
    told = {"rows": [{"text": "Bo sat on the mat."}, {"questions": [answer]}]}
    file = tmp_path / "sessions.jsonl"
    file.write_text((json.dumps(told) + "\n") * 8)
    tiny = get_config()
    text = TextData(train_paths=(str(file),), valid_paths=(str(file),), tokenizer="bytes")
    model = dataclasses.replace(tiny.model, memory_layers=(), vocab_size=text.vocab_size)
    experiment = dataclasses.replace(tiny, model=model, data=text, run_dir=str(tmp_path / "base"))
    rng = np.random.default_rng(0)
    like = abstract_weights(model)
    arrays = {n: rng.normal(0, 0.3, x.shape).astype(x.dtype) for n, x in like.named().items()}
    start_run(experiment, like.replaced(arrays))
    given = shlex.split(command.replace("\\\n", ""))
    changed = {"base": tmp_path / "base", "run_dir": tmp_path / "mine", "data.length": 128}
    changed |= {"data.train_paths": file, "data.valid_paths": file, "model.memory_layers": 1}
    for option, value in changed.items():
        given[given.index(f"--{option}") + 1] = str(value)
    rule = {"num_subkeys": 4, "key_dim": 8, "value_dim": 8, "top_k": 2}
    given += [x for name in rule for x in (f"--model.fast_weight.rule.{name}", str(rule[name]))]
    given += ["--training.steps", "3", "--training.validation_batches", "1"]
    experiment = parse_command_line(given, default="recall")
    parts = setup.make_setup(experiment)
    with Checkpoints(tmp_path / "none", experiment.checkpoint) as checkpoints:
        start = named_leaves(setup.new_state(parts, checkpoints).params)
    assert train(experiment, stream=io.StringIO()).status == "finished"
    before, after = (named_leaves(load_run(tmp_path / name).params) for name in ("base", "mine"))
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    layer = "blocks/1/memory"
    assert all(name.startswith(layer) for name in after.keys() - before.keys())
    for name in (f"{layer}/query_proj/kernel", f"{layer}_mixer/o_proj/kernel"):
        assert not np.array_equal(after[name], start[name]), name
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    losses = [line["address_loss"] for line in map(json.loads, lines) if "address_loss" in line]
    assert losses
    assert np.isfinite(losses).all()


def logits(graphdef, params, memory, tokens, write):
    run = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens, memory, write=write).logits)
    return np.asarray(run(params))


@pytest.mark.slow
def test_before_the_first_step_logits_are_the_bases_bit_for_bit(base, tmp_path):
    parts = setup.make_setup(retrofit(base, *UPDATES, "--optimizer.train", ONLY_MEMORY))
    with Checkpoints(tmp_path, parts.experiment.checkpoint) as checkpoints:
        state = setup.new_state(parts, checkpoints)
    run = load_run(base)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16) % 12
    expected = logits(run.graphdef, run.params, {}, tokens, True)
    assert np.std(expected) > 0.1
    for write in (True, False):
        actual = logits(parts.graphdef, state.params, state.memory, tokens, write)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_what_is_frozen_stays_and_takes_no_state(base, trained):
    run_dir, said, state = trained
    before, after = (named_leaves(load_run(folder).params) for folder in (base, run_dir))
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    moved = [name for name in after if name not in before]
    assert all(any(re.fullmatch(new, name) for new in NEW) for name in moved)
    updates = {name for name in moved if "lora" in name}
    assert {name.rsplit("/", 1)[0] for name in updates} == {
        *("blocks/0/mixer/q_proj", "blocks/1/mixer/q_proj", "blocks/0/feed_forward/down_proj"),
        "blocks/1/feed_forward/shared/down_proj",
    }
    for name in ("blocks/1/memory/out_proj/kernel", *(x for x in updates if x.endswith("_b"))):
        assert np.any(np.asarray(after[name])), name
    shapes = {np.shape(x) for x in jax.tree.leaves(state.opt_state) if np.ndim(x)}
    assert shapes <= {after[name].shape for name in moved}
    assert len([x for x in jax.tree.leaves(state.opt_state) if np.ndim(x)]) == 2 * len(moved)
    size = {True: 0, False: 0}
    for name, x in after.items():
        size[name in moved] += x.size
    assert f"Trains {size[True]:,} of {sum(size.values()):,} slow weights" in said
    assert f"params {4 * size[True] / 1e3:.3g} kB, optimizer" in said
    assert describe_trained(state.params, ()) == ""


@pytest.mark.slow
def test_experts_are_balanced_in_training_and_the_loss_stays_the_cross_entropy(trained):
    lines = [json.loads(x) for x in (trained[0] / "metrics.jsonl").read_text().splitlines()]
    # Even use of 4 experts, 2 a token, gives 2; times the weight.
    assert all(0.15 < line["balance_loss"] < 0.8 for line in lines)
    assert all(line["loss"] < 6 for line in lines)


@pytest.mark.slow
def test_checkpoints_refer_to_the_base_and_are_checked_against_it(trained, base, tmp_path):
    run_dir = trained[0]
    position = run_dir / "checkpoints" / "2" / "position"
    stored = json.loads(next(position.glob("*")).read_text())
    stored_params = stored["checksums"]["params"]
    assert all(any(re.fullmatch(new, name) for new in NEW) for name in stored_params)
    assert stored["frozen"]["checkpoint"] == str(base / "checkpoints" / "0")
    again = train(dataclasses.replace(load_run(run_dir).experiment), stream=io.StringIO())
    assert again.step == 2
    moved = base.with_name("elsewhere")
    base.rename(moved)
    try:
        with pytest.raises(DamagedCheckpointError, match="holds frozen weights, does not exist"):
            load_run(run_dir)
        # Another run's weights under the same path.
        run = load_run(moved)
        other = jax.tree.map(lambda x: x + 1, run.params)
        experiment = dataclasses.replace(run.experiment, run_dir=str(base))
        start_run(experiment, Weights(other, {}))
        with pytest.raises(DamagedCheckpointError, match="checksum differs"):
            load_run(run_dir)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        moved.rename(base)
    load_run(run_dir)


@pytest.mark.thorough
def test_what_does_not_go_with_the_base_is_refused(base, tmp_path):
    def refused(*options):
        parts = setup.make_setup(retrofit(base, *options))
        with Checkpoints(tmp_path, parts.experiment.checkpoint) as checkpoints:
            setup.new_state(parts, checkpoints)

    with pytest.raises(ValueError, match=r"only memories .* can be added"):
        refused("--model.tie_embeddings", "False", "--model.head_bias", "True")
    with pytest.raises(ValueError, match=r"base=.* has head, for which the model has no place"):
        refused("--model.tie_embeddings", "True")
    with pytest.raises(ValueError, match=r"optimizer\.train: 'memory' matches no parameter"):
        refused("--optimizer.train", "memory")
    with pytest.raises(ValueError, match=r"train: '\(' is no pattern"):
        OptimizerConfig(train=("(",))
    with pytest.raises(ValueError, match="starts a new run; name its --run_dir"):
        parse_command_line(["--base", str(base)], default="recall")


@pytest.mark.thorough
def test_one_option_puts_memories_into_a_run_and_trains_them_alone(base):
    command = ["--base", str(base), "--add_memory", "--run_dir", str(base.parent / "added")]
    found = parse_command_line(command, default="recall")
    assert found.model.memory_layers == (0, 1)  # A third and two thirds of two layers.
    rule, memory = found.model.fast_weight.rule, found.model.fast_weight
    assert (rule.num_subkeys, memory.chunk_size, memory.gate_residual) == (128, 128, True)
    assert found.optimizer.train == (ONLY_MEMORY,)
    start = read_experiment(base)
    assert (found.data, found.training) == (start.data, start.training)
    own = parse_command_line(
        [*command, "--model.memory_layers", "1", "--model.fast_weight.rule.num_subkeys", "8"],
        default="recall",
    )
    assert own.model.memory_layers == (1,)
    assert own.model.fast_weight.rule.num_subkeys == 8
    assert own.model.fast_weight.gate_residual


@pytest.mark.slow
def test_a_run_with_memories_gets_no_others(trained):
    run_dir, _, _ = trained
    command = ["--base", str(run_dir), "--add_memory", "--run_dir", str(run_dir.parent / "more")]
    with pytest.raises(ValueError, match=r"new has memories in layers \(1,\); leave it out"):
        parse_command_line(command, default="recall")
    with pytest.raises(ValueError, match="recall has memories in layers"):
        parse_command_line(["recall", *command], default="recall")
