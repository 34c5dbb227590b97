"""Configurations as JSON: dataclass trees with every name and type checked on the way back."""

import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union

import numpy as np

from fwpkm_jax.literals import nearest

# What the devices count and compute in.
_MOST_INT = 2**31 - 1
_MOST_FLOAT = float(np.finfo(np.float32).max)


class UnknownNameError(ValueError):
    """A configuration names a field or a class that this version does not have."""


def to_json(config: Any) -> Any:
    """JSON values of a dataclass tree; a dataclass carries its name under `class`.

    Fields whose metadata say `stored=False` are left out.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        stored = filter(_is_stored, dataclasses.fields(config))
        fields = {f.name: to_json(getattr(config, f.name)) for f in stored}
        return {"class": type(config).__name__, **fields}
    if isinstance(config, tuple | list):
        return [to_json(item) for item in config]
    if isinstance(config, float):
        return float(config)  # Not one of NumPy.
    if config is None or isinstance(config, bool | int | str):
        return config
    raise TypeError(f"{config!r} in a configuration has no JSON form.")


def _is_stored(field: dataclasses.Field) -> bool:
    return field.metadata.get("stored", True)


def from_json(values: Any, annotation: Any, *, path: str = "config", whole: bool = False) -> Any:
    """The configuration that `to_json` wrote, every name and type checked.

    Args:
      path: what errors call the place.
      whole: whether every field must be there, also one with a default: another version may have
        had another one, or not have had the field.

    Raises:
      UnknownNameError: a field or class is unknown (the nearest name is given), or a field is
        missing.
      ValueError: a value has the wrong type, or a dataclass refuses its values.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _from_json_union(values, arguments, path, whole)
    if origin is Literal:
        if values not in arguments:
            hint = nearest(str(values), [str(a) for a in arguments])
            raise ValueError(f"{path}={values!r} is none of {list(arguments)}{hint}.")
        return values
    if origin is tuple:
        return _from_json_tuple(values, arguments, path, whole)
    if _is_section(annotation):
        return _from_json_dataclass(values, annotation, path, whole)
    if annotation is float and isinstance(values, int | float) and not isinstance(values, bool):
        if not abs(values) <= _MOST_FLOAT:
            raise ValueError(f"{path}={values!r} must be finite in float32.")
        return float(values)
    if annotation is type(None):
        annotation = types.NoneType
    if not isinstance(annotation, type) or type(values) is not annotation:
        raise ValueError(f"{path}={values!r} must be {getattr(annotation, '__name__', annotation)}")
    if annotation is int and abs(values) > _MOST_INT:
        raise ValueError(f"{path}={values!r} must lie within int32.")
    return values


def _from_json_union(values: Any, options: Sequence[Any], path: str, whole: bool) -> Any:
    """The value as the one of `options` it belongs to; dataclasses are told by their `class`."""
    if values is None and types.NoneType in options:
        return None
    if isinstance(values, dict):
        options = [o for o in options if _is_section(o)]
        classes = {cls.__name__: option for option in options for cls in final_classes(option)}
        name = values.get("class")
        if not isinstance(name, str) or name not in classes:
            raise UnknownNameError(
                f"{path}.class={name!r} is none of {sorted(classes)}{nearest(str(name), classes)}."
            )
        return from_json(values, classes[name], path=path, whole=whole)
    errors = []
    for option in options:
        try:
            return from_json(values, option, path=path, whole=whole)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; ".join(errors))


def _from_json_tuple(values: Any, items: Sequence[Any], path: str, whole: bool) -> tuple[Any, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{path}={values!r} must be a list.")
    if len(items) == 2 and items[1] is ...:
        items = [items[0]] * len(values)
    if len(items) != len(values):
        raise ValueError(f"{path}={values!r} must have {len(items)} entries.")
    pairs = enumerate(zip(values, items, strict=True))
    return tuple(from_json(v, item, path=f"{path}[{i}]", whole=whole) for i, (v, item) in pairs)


def _from_json_dataclass(values: Any, annotation: type, path: str, whole: bool) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{path}={values!r} must be an object with the fields of a section.")
    values = dict(values)
    classes = {cls.__name__: cls for cls in final_classes(annotation)}
    name = values.pop("class", None if inspect.isabstract(annotation) else annotation.__name__)
    if not isinstance(name, str) or name not in classes:
        hint = nearest(str(name), classes)
        raise UnknownNameError(f"{path}.class={name!r} is none of {sorted(classes)}{hint}.")
    cls = classes[name]
    types_of = hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for unknown in values.keys() - set(names):
        raise UnknownNameError(f"{path}.{unknown} is not a field{nearest(unknown, names)}.")
    decoded = {
        name: from_json(value, types_of[name], path=f"{path}.{name}", whole=whole)
        for name, value in values.items()
    }
    for field in dataclasses.fields(cls):
        defaults = (field.default, field.default_factory)
        needed = (whole and _is_stored(field)) or defaults == (dataclasses.MISSING,) * 2
        if field.init and needed and field.name not in decoded:
            raise UnknownNameError(f"{path}.{field.name} is missing.")
    try:
        return cls(**decoded)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


hints = functools.cache(typing.get_type_hints)  # Resolving them is slow.


def final_classes(annotation: type) -> Iterator[type]:
    """The classes that an annotation stands for: itself, or the implementations of an interface.

    An interface whose implementations are imported by name says where those names are: `registry`.
    """
    if (registry := getattr(annotation, "registry", None)) is not None:
        importlib.import_module(registry).load_all()
    if not inspect.isabstract(annotation):
        yield annotation
    for subclass in annotation.__subclasses__():
        yield from final_classes(subclass)


def _is_section(annotation: Any) -> bool:
    """Whether the annotation is a dataclass, or an interface of which dataclasses are made."""
    if not isinstance(annotation, type):
        return False
    return dataclasses.is_dataclass(annotation) or inspect.isabstract(annotation)
