"""Every field that takes one of a few names refuses another and gives the nearest."""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import typing
from pathlib import Path

import pytest

import fwpkm_jax
from fwpkm_jax import literals
from fwpkm_jax.core.slots.write import KeyWrite
from fwpkm_jax.interchange.hf.families import Family
from fwpkm_jax.models.block import ForwardContext

# Made by our code alone, from values that a configuration has checked.
INTERNAL = (KeyWrite, Family, ForwardContext)


def choices_by_class():
    """Every dataclass of the package that can be made, with the fields that list their values."""
    found = {}
    for module in pkgutil.walk_packages(fwpkm_jax.__path__, "fwpkm_jax."):
        # The options in `cli` come from a command line alone, which knows their values.
        if module.name.endswith("__main__") or module.name.startswith("fwpkm_jax.cli"):
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls)):
                continue
            ours = cls.__module__.startswith("fwpkm_jax.") and ".cli" not in cls.__module__
            if ours and not inspect.isabstract(cls) and cls not in INTERNAL:
                found[cls] = literals._choices(cls)
    return {cls: choices for cls, choices in found.items() if choices}


def required_fields(cls):
    """Something for each field without a default; names are checked before what these are."""
    hints = typing.get_type_hints(cls)
    names = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    listed = {name: choice.values[0] for name, choice in literals._choices(cls).items()}
    return {name: listed.get(name, Path("x") if hints[name] is Path else None) for name in names}


@pytest.mark.usefixtures("without_type_checks")
def test_every_field_that_lists_its_values_is_checked_when_it_is_made():
    fields = 0
    for cls, choices in choices_by_class().items():
        required = required_fields(cls)
        for name, choice in choices.items():
            names = [value for value in choice.values if isinstance(value, str)]
            wrong = f"{names[0]}x"
            with pytest.raises(ValueError, match=f"{name}.*={wrong!r} is none of") as refusal:
                cls(**{**required, name: (wrong,) if choice.repeated else wrong})
            assert f"the nearest name is {names[0]}" in str(refusal.value), cls
            fields += 1
    assert fields > 40


@dataclasses.dataclass(frozen=True)
class Sample:
    size: int | typing.Literal["all"] = "all"
    factor: typing.Literal["paper"] | float | None = "paper"
    kinds: tuple[typing.Literal["key", "value"], ...] = ()
    mode: typing.Literal["on", "off"] | None = None
    free: str | typing.Literal["any"] = "any"

    def __post_init__(self):
        literals.check_fields(self)


def test_unions_and_tuples_take_what_they_say():
    Sample(size=3, factor=2.5, kinds=("value", "key"), mode="off", free="thing")
    Sample(size="all", factor=None, kinds=(), mode=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "al"}, r"size='al' is none of \['all'\]; the nearest name is all"),
        ({"factor": "papier"}, "factor='papier'"),
        ({"kinds": ("key", "valeu")}, r"kinds\[1\]='valeu'.*nearest name is value"),
        ({"mode": True}, "mode=True is none of"),
        ({"mode": 1}, "mode=1 is none of"),
    ],
)
def test_other_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Sample(**changes)


def test_the_example():
    assert doctest.testmod(literals).failed == 0
