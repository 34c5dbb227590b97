"""Every field that a configuration can have, and values that it should not have."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from fwpkm_jax.config import Experiment
from fwpkm_jax.core.slots.options.retention import Retention
from fwpkm_jax.data import NeedleMix, TextData
from fwpkm_jax.data.sessions import SessionRows
from fwpkm_jax.layers.fast_weight_layers.layer import FastWeightLayerConfig
from fwpkm_jax.layers.lora import LoRAConfig
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.in_place import InPlaceConfig
from fwpkm_jax.layers.mixers.lact import LaCTConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig, MatrixMixerConfig
from fwpkm_jax.layers.mixers.titans import TitansConfig
from fwpkm_jax.layers.mixers.titans_variants import TitansMixerConfig
from fwpkm_jax.layers.pkm import PKMConfig
from fwpkm_jax.layers.rotary import Llama3Scaling, YarnConfig
from fwpkm_jax.models.config import Mixer
from fwpkm_jax.rules import SDM, FwMLP
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.rules.matrix.deltanet import DeltaNet
from tests.training.tiny_config import get_config

Path = tuple[str | int, ...]


class Field(NamedTuple):
    """A field of a section that an experiment uses."""

    base: str
    """Name of the experiment in `bases()`."""
    path: Path
    """Names, and places in tuples, that lead to it."""
    annotation: Any
    """Its type; None taken out of it."""
    owner: str
    """`Class.field`."""


def bases() -> dict[str, Experiment]:
    """Experiments of which each section is used by at least one."""
    tiny = get_config()
    needles = NeedleMix(num_needles=1, key_characters=2, value_digits=2, min_distance=8)
    text = TextData(
        train_paths=("a.txt",),
        train_weights=(1.0,),
        valid_paths=("a.txt",),
        length=128,
        needles=needles,
    )
    sessions = dataclasses.replace(text, needles=None, sessions=SessionRows())
    yarn = YarnConfig(factor=4.0, original_length=16)
    llama3 = Llama3Scaling(factor=4.0, original_length=16)
    fast_weight = dataclasses.replace(
        tiny.model.fast_weight, rule=FwMLP(key_dim=8, value_dim=8, hidden_dim=8)
    )
    retentive = dataclasses.replace(
        tiny.model.fast_weight,
        rule=dataclasses.replace(tiny.model.fast_weight.rule, retention=Retention()),
    )
    heads: dict[str, Any] = {
        "num_key_heads": 1, "num_value_heads": 1, "key_head_dim": 8, "value_head_dim": 8,
    }  # fmt: skip
    models: dict[str, dict[str, Any]] = {
        "tiny": {},
        "text": {
            "vocab_size": 257,
            "fast_weight": fast_weight,
            "attention": dataclasses.replace(tiny.model.attention, llama3=llama3),
        },
        "matrix": {
            "fast_weight": retentive,
            "mixers": tuple(MATRIX_RULES),
            "matrix": MatrixMemoryConfig(
                **heads, rules=tuple(rule() for rule in MATRIX_RULES.values())
            ),
        },
        "objects": {
            "fast_weight": dataclasses.replace(
                tiny.model.fast_weight,
                rule=SDM(num_subkeys=4, value_dim=8, num_writes=2, num_reads=2),
            ),
            "mixers": (
                MatrixMixerConfig(rule=DeltaNet(), **heads),
                InPlaceConfig(hidden_dim=8, chunk_size=8),
                TitansMixerConfig(
                    variant="mag",
                    memory=TitansConfig(num_heads=1, head_dim=8, chunk_size=8),
                    attention=dataclasses.replace(tiny.model.attention, window=8),
                ),
            ),
        },
        "others": {
            "mixers": ("lact", "titans", "gdn"),
            "lact": LaCTConfig(
                num_heads=2, num_fast_heads=1, hidden_dim=8, chunk_size=8, window=8, low_rank=4,
                yarn=yarn,
            ),
            "titans": TitansConfig(num_heads=1, head_dim=8, chunk_size=8),
            "gdn": GatedDeltaNetConfig(**heads),
            "pkm_layers": (0,),
            "pkm": PKMConfig(num_subkeys=4, key_dim=8, value_dim=8, num_heads=2, top_k=2),
            "fast_weight_layer": FastWeightLayerConfig(hidden_dim=8, chunk_size=8),
            "lora": LoRAConfig(),
        },
    }  # fmt: skip
    return {
        name: dataclasses.replace(
            tiny,
            model=dataclasses.replace(tiny.model, **changes),
            data={"text": text, "objects": sessions}.get(name, tiny.data),
        )
        for name, changes in models.items()
    }


def _unused(experiment: Experiment) -> set[str]:
    """Sections of the model that no layer of the layout uses."""
    model = experiment.model
    users = {"attention": {"swa"}, "gdn": {"gdn"}, "lact": {"lact"}, "titans": {"titans"}}
    users["matrix"] = set(MATRIX_RULES)
    unused = {name for name, mixers in users.items() if not mixers & set(model.mixers)}
    return unused if model.pkm_layers else {*unused, "pkm"}


def fields() -> list[Field]:
    """Each field of each section once."""
    found: dict[str, Field] = {}
    for base, experiment in bases().items():
        for field in _walk(base, experiment, (), without=_unused(experiment)):
            found.setdefault(field.owner, field)
    return list(found.values())


def _walk(base: str, config: Any, path: Path, *, without: set[str]) -> Iterator[Field]:
    hints = typing.get_type_hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value, place = getattr(config, name), (*path, name)
        if dataclasses.is_dataclass(value):
            if name not in without:
                yield from _walk(base, value, place, without=without)
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for index, item in enumerate(value):
                yield from _walk(base, item, (*place, index), without=without)
        else:
            yield Field(base, place, _not_none(hints[name]), f"{type(config).__name__}.{name}")


def _not_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(x for x in typing.get_args(hint) if x is not types.NoneType)
    return hint


def bad_values(annotation: Any) -> dict[str, Any]:
    """Invalid JSON values by the kind of fault."""
    number = {"nan": math.nan, "infinite": math.inf, "text": "many", "truth": True, "list": [1]}
    if annotation is int:
        return {"negative": -3, "zero": 0, "huge": 2**40, "fraction": 1.5, **number}
    if annotation is float:
        edges = {"negative": -0.5, "zero": 0.0, "small": 1e-300, "large": 1e30}
        return {**edges, "huge": 1e300, "beyond": 10**400, **number}
    if annotation is bool:
        return {"number": 1, "text": "yes"}
    if annotation is str:
        return {"number": 3}
    if annotation == Mixer:
        return {"unknown": "unheard of", "number": 3}
    if typing.get_origin(annotation) is typing.Literal:
        return {"unknown": "unheard of", "number": 3}
    if dataclasses.is_dataclass(annotation):
        return {"number": 3, "text": "many"}
    assert typing.get_origin(annotation) is tuple, annotation
    items = typing.get_args(annotation)
    rest = [] if ... in items else [0.5]
    inside = {kind: [value, *rest] for kind, value in bad_values(items[0]).items()}
    return {**inside, "number": 3, "text": "many"}


def json_with(values: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """An experiment's JSON with the value at a path replaced, in place."""
    place: Any = values
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return values
