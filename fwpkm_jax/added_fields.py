"""Fields that a dataclass got later: what a configuration written before means by their absence."""

import dataclasses
from typing import Any

_BEFORE = "before"


def meant_before(value: Any) -> dict[str, Any]:
    """The metadata of a field whose absence from a stored configuration means `value`.

    Use it where a new field's default differs from what the code did before it had the field. Runs
    written without the field keep their meaning; new configurations have the default.

    Example:
      >>> from dataclasses import dataclass, field
      >>> @dataclass(frozen=True)
      ... class Layer:
      ...     start: str = field(default="drawn", metadata=meant_before("constant"))
      >>> Layer().start, values_before(Layer)
      ('drawn', {'start': 'constant'})
    """
    return {_BEFORE: value}


def values_before(cls: Any) -> dict[str, Any]:
    """The values of a dataclass's added fields that a configuration without them stands for."""
    found = dataclasses.fields(cls)
    return {field.name: field.metadata[_BEFORE] for field in found if _BEFORE in field.metadata}
