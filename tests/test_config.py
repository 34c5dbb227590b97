"""The command line, the config files and the JSON form of an experiment."""

import ast
import dataclasses
import inspect
import json
import re
import typing
from pathlib import Path

import pytest

from fwpkm_jax.cli.experiment import parse_command_line, unused_sections
from fwpkm_jax.config import (
    Experiment,
    from_json,
    load_config,
    read_experiment,
    shipped_configs,
)
from fwpkm_jax.config_json import UnknownNameError
from fwpkm_jax.data import TextData
from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.layers.mixers import AttentionConfig
from fwpkm_jax.layers.rotary import YarnConfig
from fwpkm_jax.training.training_config import WITHOUT_EFFECT
from tests.training.tiny_config import get_config

CONFIG = Path(__file__).parent / "training" / "tiny_config.py"
TEXT = TextData(train_paths=("a.txt", "b"), train_weights=(0.5, 2.0), valid_paths=("c.jsonl",))


def parse(*arguments):
    return parse_command_line([str(CONFIG), *arguments], default="configs/none.py")


def override(experiment, path, value):
    """The experiment with the field at a dotted path replaced."""
    name, _, rest = path.partition(".")
    if rest:
        value = override(getattr(experiment, name), rest, value)
    return dataclasses.replace(experiment, **{name: value})


def reachable(annotation):
    """Every dataclass that a configuration of this type may hold."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        yield annotation
        for hint in typing.get_type_hints(annotation).values():
            yield from reachable(hint)
    for argument in typing.get_args(annotation):
        yield from reachable(argument)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("seed", ["7"], 7),
        ("data.num_facts", ["1"], 1),
        ("data.num_questions", ["None"], None),
        ("model.fast_weight.rule.top_k", ["3"], 3),
        ("model.fast_weight.weight_by_gate", ["False"], False),
        ("model.mixers", ["gdn", "swa"], ("gdn", "swa")),
        ("model.pkm_layers", [], ()),
        ("optimizer.betas", ["0.8", "0.99"], (0.8, 0.99)),
        ("optimizer.clip_norm", ["None"], None),
        ("optimizer.clip_norm", ["2"], 2.0),
        ("training.memory.lifetime", ["batch"], "batch"),
        ("training.validate_every", ["5"], 5),
        ("run_dir", ["elsewhere"], "elsewhere"),
    ],
    ids=str,
)
def test_every_kind_of_field_is_set_from_the_command_line(option, text, value):
    assert parse(f"--{option}", *text) == override(get_config(), option, value)


def test_options_may_be_written_with_hyphens_and_equals_signs():
    assert parse("--run-dir=x", "--model.fast-weight.chunk-size=4") == override(
        override(get_config(), "run_dir", "x"), "model.fast_weight.chunk_size", 4
    )


def test_a_section_that_is_none_is_added_from_the_command_line():
    yarn = YarnConfig(factor=4.0, original_length=16)
    options = ("--model.attention.yarn.factor", "4", "--model.attention.yarn.original_length", "16")
    assert parse(*options) == override(get_config(), "model.attention.yarn", yarn)


def shown_help(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        parse_command_line([*arguments, "--help"], default=CONFIG)
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_the_mixer_of_memories_is_the_json_of_a_configuration():
    mixer = AttentionConfig(window=8)
    given = parse("--model.memory_mixer", '{"class": "AttentionConfig", "window": 8}')
    assert given == override(get_config(), "model.memory_mixer", mixer)
    assert parse("--model.memory_mixer", "None") == get_config()


def test_help_lists_the_options_that_the_models_layers_use(capsys):
    text = shown_help(capsys)
    assert "Seed of parameters" in text
    for option in ("--seed", "--model.fast_weight.rule.top_k", "--data.num_facts"):
        assert f"{option} INT" in text
    for section in ("gdn", "titans", "pkm", "attention.yarn"):
        assert f"--model.{section}." not in text
        assert f"--model.{section}." in shown_help(capsys, f"--model.{section}.x", "1")
    assert parse("--model.mixers", "swa", "gdn", "--model.gdn.chunk_size", "8") == override(
        override(get_config(), "model.mixers", ("swa", "gdn")), "model.gdn.chunk_size", 8
    )


@pytest.mark.parametrize("config", shipped_configs())
def test_a_run_has_at_most_130_options(config, capsys):
    options = re.findall(r"^[│ ]+(--[a-z._]+) ", shown_help(capsys, config), re.MULTILINE)
    assert 70 < len(options) <= 130


@pytest.mark.parametrize(
    ("config", "used"),
    [
        ("titans", {"attention", "titans"}),
        ("matrix_memory", {"attention", "matrix"}),
        ("lact", {"lact"}),
        ("gdn_swa__pkm6_fwpkm2_10", {"attention", "gdn", "fast_weight", "pkm"}),
        ("fast_weight_layer", {"attention", "fast_weight_layer"}),
    ],
)
def test_the_sections_in_use_are_those_that_the_layers_read(config, used):
    sections = {"attention", "gdn", "lact", "titans", "matrix", "fast_weight", "pkm", "experts"}
    assert unused_sections(load_config(config).model) == sections - used


@pytest.mark.parametrize("cls", sorted(set(reachable(Experiment)), key=lambda c: c.__name__))
def test_every_field_explains_itself(cls):
    """tyro shows the string under a field as its help."""
    (definition,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    statements = definition.body
    for statement, after in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert explained, f"{cls.__name__}.{statement.target.id} has no docstring"


@pytest.mark.parametrize("data", [get_config().data, TEXT], ids=["recall", "text"])
def test_json_gives_back_the_experiment(data):
    yarn = YarnConfig(factor=4.0, original_length=16)
    experiment = override(
        dataclasses.replace(get_config(), data=data), "model.attention.yarn", yarn
    )
    text = json.dumps(experiment.to_json())
    assert from_json(json.loads(text)) == experiment


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("trainig", {}, r"config\.trainig is not a field; the nearest name is training\."),
        ("model.fast_weight.rule.topk", 3, r"rule\.topk is not a field; .* top_k\."),
        ("training.steps", 2.5, r"training\.steps=2\.5 must be int"),
        ("training.steps", True, r"training\.steps=True must be int"),
        ("model.tie_embeddings", 1, r"tie_embeddings=1 must be bool"),
        ("model.mixers", "swa", r"model\.mixers='swa' must be a list"),
        ("optimizer.betas", [0.9], r"betas=\[0\.9\] must have 2 entries"),
        ("optimizer.clip_norm", "big", r"clip_norm='big' must be"),
        ("training.memory.lifetime", "bach", r"lifetime='bach' is none of .*nearest name is batch"),
        ("data.class", "RecalData", r"data\.class='RecalData' is none of .* is RecallData"),
        ("training.steps", 0, r"config\.training: steps=0 is too small"),
        ("model", None, r"config\.model=None must be an object"),
    ],
)
def test_wrong_json_is_refused_by_name(path, value, message):
    values = get_config().to_json()
    *sections, name = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[name] = value
    with pytest.raises(ValueError, match=message):
        from_json(values)


def test_json_without_a_required_field_is_refused():
    values = get_config().to_json()
    del values["model"]
    with pytest.raises(ValueError, match="model"):
        from_json(values)


def test_json_from_before_a_field_existed_is_refused_by_the_fields_name():
    values = get_config().to_json()
    del values["optimizer"]["decay_steps"]
    with pytest.raises(UnknownNameError, match=r"config.optimizer.decay_steps is missing\."):
        from_json(values)


def test_fingerprint_ignores_exactly_what_changes_no_number():
    base = get_config()
    others = {
        "run_dir": "elsewhere",
        "mesh": dataclasses.replace(base.mesh, data=2),
        "distributed": dataclasses.replace(base.distributed, detect=True),
        "checkpoint": dataclasses.replace(base.checkpoint, every=1),
        "log": ("wandb",),
        "profile": 5,
        "training.log_every": 1,
        "training.validate_every": 3,
        "training.validation_batches": 2,
    }
    assert others.keys() == set(WITHOUT_EFFECT)
    for path, value in others.items():
        assert override(base, path, value).fingerprint == base.fingerprint
    effective = {
        "seed": 1,
        "model.fast_weight.rule.learning_rate": 0.5,
        "data.num_facts": 1,
        "optimizer.eps": 1e-6,
        "training.steps": 21,
        "training.memory.lifetime": "batch",
    }
    seen = {override(base, path, value).fingerprint for path, value in effective.items()}
    assert len(seen | {base.fingerprint}) == len(effective) + 1
    assert dataclasses.replace(base, data=TEXT).fingerprint not in seen


def test_the_default_config_is_used_where_none_is_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from tests.training.tiny_config import get_config\n")
    assert parse_command_line(["--seed", "3"], default=file).seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"defines no get_config\(\)"),
        ("def get_config():\n    return 3\n", "returned a int; it must return an Experiment"),
    ],
)
def test_a_config_file_must_give_an_experiment(tmp_path, text, message):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "bad.py")


def test_a_missing_config_file_gets_the_nearest_name():
    with pytest.raises(
        FileNotFoundError, match=r"tiny_confg\.py; the nearest name is .*config\.py"
    ):
        load_config(CONFIG.with_name("tiny_confg.py"))
    with pytest.raises(FileNotFoundError, match=r"There is no config file nowhere/x\.py"):
        load_config("nowhere/x.py")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG.with_name("nope.py"), r"There is no config file .*/nope\.py\.$"),
        ("recal", r"'recal'; the nearest name is recall\. fwpkm configs lists them"),
        ("foo", r"'foo'\. fwpkm configs lists them; the path of a file ends in \.py\."),
        ("model.model_dim=32", "an option starts with two hyphens: --section.field VALUE"),
    ],
)
def test_a_name_is_suggested_only_if_it_is_similar(config, message):
    with pytest.raises(FileNotFoundError, match=message):
        load_config(config)


def test_the_vocabulary_follows_the_data_unless_an_option_sets_it():
    base = get_config()
    more = base.data.vocab_size + 3
    wider = parse("--data.num_values", str(base.data.num_values + 3))
    assert (wider.data.vocab_size, wider.model.vocab_size) == (more, more)
    both = parse(
        "--data.num_values", str(base.data.num_values + 3), "--model.vocab_size", str(more + 1)
    )
    assert both.model.vocab_size == more + 1
    text = ["books_tiny", "--data.tokenizer", "mistral-v1"]
    assert parse_command_line(text, default=CONFIG).model.vocab_size == 32_000
    assert parse("--data.num_facts", "1").model == base.model


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        read_experiment(tmp_path)


def test_a_stored_value_that_cannot_be_is_named_and_no_version_is_blamed(tmp_path):
    path = tmp_path / "config.json"
    for change, said in (
        ({"seed": -5}, r"seed=-5 is too small"),
        ({"seed": "x"}, r"seed='x' must be int"),
        ({"log": ["paper"]}, r"log\[0\]='paper' is none of"),
    ):
        path.write_text(json.dumps({**get_config().to_json(), **change}))
        with pytest.raises(OutsideFileError, match=said) as error:
            read_experiment(tmp_path)
        message = str(error.value)
        assert message.startswith(f"{path} cannot be used (")
        assert message.endswith(
            "; put back a copy: each checkpoint has one, checkpoints/STEP/config/metadata."
        )
        assert "version" not in message
    values = get_config().to_json()
    for change in ({"sead": 1}, {"model": {**values["model"], "class": "Modl"}}):
        path.write_text(json.dumps({**values, **change}))
        with pytest.raises(OutsideFileError, match="another version of fwpkm_jax wrote this run"):
            read_experiment(tmp_path)


def test_resuming_takes_the_runs_own_configuration(tmp_path):
    trained = override(get_config(), "seed", 5)
    (tmp_path / "config.json").write_text(json.dumps(trained.to_json()))
    run = ["--resume", str(tmp_path)]
    own = override(trained, "run_dir", str(tmp_path))
    assert parse_command_line(run, default=CONFIG) == own
    longer = parse_command_line(["--training.steps=40", *run], default=CONFIG)
    assert longer == override(own, "training.steps", 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recall", "--resume", "RUN"], "leave out recall"),
        (["--resume", "RUN", "--run_dir", "x"], "leave out --run_dir"),
        (["--resume", "nowhere"], "nowhere holds no run"),
    ],
)
def test_resuming_needs_a_run_and_nothing_else(arguments, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(get_config().to_json()))
    arguments = [str(tmp_path) if a == "RUN" else a for a in arguments]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        parse_command_line(arguments, default=CONFIG)
