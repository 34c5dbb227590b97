"""Fields that a dataclass got or lost later: what a configuration written before means by them."""

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


LAST_WITH_REMOVED = "before-one-room"
"""The tag of the last version that had the fields which a class names in `removed_fields`."""


def without_removed(cls: Any, values: dict[str, Any], *, path: str) -> dict[str, Any]:
    """A stored section without the fields that its class has lost, where these were off.

    Args:
      cls: a dataclass; its class attribute `removed_fields` has the values of removed fields at
        which they were off.
      values: the section.
      path: of the section, for messages.

    Raises:
      ValueError: such a field was in use.
    """
    removed = getattr(cls, "removed_fields", {})
    for name in values.keys() & removed.keys():
        if values[name] != removed[name]:
            raise ValueError(
                f"{path}.{name}={values[name]!r}: this option was removed, as no measurement "
                f"recommends it; check out the tag {LAST_WITH_REMOVED} to go on with it."
            )
    return {name: value for name, value in values.items() if name not in removed}
