"""Sets every field of a configuration to invalid values, one after the other."""

import dataclasses
import inspect
import io
import itertools
import json
import typing

import pytest

from fwpkm_jax import config_json
from fwpkm_jax.config import Experiment, from_json
from fwpkm_jax.config_json import final_classes
from fwpkm_jax.run.train import train
from fwpkm_jax.training.diagnosis import NonFiniteError
from fwpkm_jax.training.runs.processes import DistributedConfig
from tests.faults.config_values import Field, bad_values, bases, fields, json_with

BASES = bases()
BY_CLASS = {
    owner: list(group)
    for owner, group in itertools.groupby(
        sorted(fields(), key=lambda field: field.owner), key=lambda field: field.owner.split(".")[0]
    )
}
ZERO_MEANS_SOMETHING = {
    "Experiment.seed",
    "AttentionConfig.rotary_fraction",
    "ExpertsConfig.balance_weight",
    "FastWeightConfig.gate_bias",
    "MemoryConfig.address_loss",
    "ModelConfig.expert_layers",
    "ModelConfig.memory_layers",
    "ModelConfig.pkm_layers",
    "ModelConfig.post_norm_layers",
    "ModelConfig.sandwich_norm_layers",
    "ModelConfig.head_init_std",
    "ModelConfig.branch_init_scale",
    "Comba.correction",
    "FwMLP.lookahead",
    "FwMLP.learning_rate",
    "FwMLP.weight_decay",
    "FwPKM.addressing_weight",
    "InPlaceConfig.learning_rate",
    "SDM.decay_bias",
    "SDM.strength_bias",
    "FwPKM.learning_rate",
    "FwPKM.lookahead",
    "FwPKM.value_step",
    "FwPKM.weight_decay",
    "NeedleMix.sentence_weight",
    "OptimizerConfig.betas",
    "PreconditionedGatedDeltaNet.center",
    "PreconditionedKDA.center",
    "OptimizerConfig.final_fraction",
    "OptimizerConfig.warmup_steps",
    "OptimizerConfig.weight_decay",
    "RecallData.other_loss_weight",
    "SessionRows.answer_weight",
    "SessionRows.text_weight",
    "Retention.hardening",
    "Retention.relocation",
    "Retention.replay",
    "TitansConfig.momentum_order",
    "TitansConfig.num_persistent",
    "TrainingConfig.validation_batches",
    "TrainingConfig.window_probability",
}

NEGATIVE_MEANS_SOMETHING = {
    "FastWeightConfig.gate_bias",
    "PreconditionedGatedDeltaNet.center",
    "PreconditionedKDA.center",
    "SDM.decay_bias",
    "SDM.strength_bias",
}
"""Fields whose numbers may be below 0."""


def refusal(field: Field, value: object) -> str | None:
    """The message of the error that such a value raises; None if the value is accepted."""
    try:
        part, path, cls = BASES[field.base], field.path, Experiment
        if path[0] == "distributed":  # Runs do not store it; the command line reads it alike.
            part, path, cls = part.distributed, path[1:], DistributedConfig
        config_json.from_json(json_with(config_json.to_json(part), path, value), cls)
    except ValueError as error:
        return str(error)
    return None


def takes(field: Field, kind: str) -> bool | None:
    """Whether a field takes such a value; None: it may."""
    if kind == "zero":
        return field.owner in ZERO_MEANS_SOMETHING
    if kind == "negative":
        return field.owner in NEGATIVE_MEANS_SOMETHING
    # Numbers as legal as any other; whether a run with them stays finite is its own matter.
    return None if kind in ("small", "large") else False


def reachable(annotation: object) -> set[type]:
    """Every dataclass that a configuration of this type may hold."""
    found = set()
    interface = inspect.isabstract(annotation)
    if isinstance(annotation, type) and (dataclasses.is_dataclass(annotation) or interface):
        for cls in final_classes(annotation):
            found |= {cls}.union(*map(reachable, typing.get_type_hints(cls).values()))
    return found.union(*map(reachable, typing.get_args(annotation)))


def test_every_section_is_tried():
    names = {
        cls.__name__
        for cls in reachable(Experiment)
        if cls.__module__.startswith("fwpkm_jax.") and not cls.__name__.startswith("Abstract")
    }
    assert names == BY_CLASS.keys()


@pytest.mark.by_default(
    "AttentionConfig",
    "DistributedConfig",
    "Experiment",
    "FastWeightConfig",
    "FwPKM",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecallData",
    "TrainingConfig",
    thorough=[],
)
@pytest.mark.parametrize("owner", BY_CLASS)
def test_a_value_that_means_nothing_is_refused_by_its_fields_name(fault, owner):
    for field in BY_CLASS[owner]:
        name = field.owner.split(".")[1]
        for kind, value in bad_values(field.annotation).items():
            message = refusal(field, value)
            with fault("a configuration value out of range or of a wrong type"):
                if message is None:
                    assert takes(field, kind) is not False, (field.owner, kind)
                else:
                    assert takes(field, kind) is not True, (field.owner, kind)
                    shown = value[0] if isinstance(value, list) else value
                    assert name in message, (field.owner, kind)
                    assert str(shown) in message, (field.owner, kind)


@pytest.mark.parametrize(
    ("field", "value"),
    [("optimizer", {"eps": float("inf")}), ("mesh", {"data": 2**40}), ("seed", -1)],
)
def test_a_configuration_made_in_python_is_held_to_the_same(field, value):
    experiment = BASES["tiny"]
    if isinstance(value, dict):
        (name,) = value
        value = dataclasses.replace(getattr(experiment, field), **value)
    else:
        name = field
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(experiment, **{field: value})


ODD = [
    pytest.param(field, value, id=f"{field.owner}={value}")
    for owner in BY_CLASS.values()
    for field in owner
    for kind, value in bad_values(field.annotation).items()
    if takes(field, kind) is not False
]


@pytest.mark.slow
@pytest.mark.parametrize(("field", "value"), ODD)
def test_an_odd_value_trains_or_says_what_is_wrong(fault, field, value, tmp_path, monkeypatch):
    if refusal(field, value) is not None:
        pytest.skip("refused, as another test shows")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("all work and no play makes a dull boy " * 40)
    values = BASES[field.base].to_json()
    values["training"] |= {"steps": 2, "validation_batches": 1}
    experiment = from_json(json_with(values, field.path, value))
    with fault("an odd but legal configuration value"):
        try:
            result = train(experiment, stream=io.StringIO())
        except ValueError:
            return  # Something that only the whole experiment shows, in one clear line.
        except NonFiniteError as error:
            ended = str(error)
        else:
            ended = f"step {result.step}"
        assert ended == "step 2" or "First fault found" in ended
        if ended == "step 2":
            records = (tmp_path / experiment.run_dir / "metrics.jsonl").read_text().splitlines()
            assert all(None not in json.loads(record).values() for record in records)
