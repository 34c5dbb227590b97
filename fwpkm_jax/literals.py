"""Fields that take one of a few names, and the hint where none of them was given."""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Union


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: `; the nearest name is NAME`.

    Empty where no name is similar.
    """
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)
    return f"; the nearest name is {close[0]}" if close else ""


def some(names: Sequence[str], *, like: str = "", most: int = 6) -> str:
    """Names for a message: all of a few, or those nearest to `like` and how many more there are.

    Example:
      >>> some(["a", "b"]), some([f"user{n}" for n in range(9999)], like="user77", most=1)
      ('a, b', 'user77 and 9,998 others')
    """
    if len(names) <= most:
        return ", ".join(names)
    close = difflib.get_close_matches(like, names, n=most, cutoff=0.6) if like else []
    shown = close or names[:most]
    return f"{', '.join(shown)} and {len(names) - len(shown):,} others"


def check_literals(config: Any) -> None:
    """Checks the fields of a dataclass whose annotations list the values they take.

    Call it first in `__post_init__`, so that a misspelt name never reaches a computation.

    Args:
      config: an instance of a dataclass. A field counts where its annotation is a `Literal`, a
        union with one (`int | Literal["flush"]`), or a tuple of them.

    Raises:
      ValueError: a field has another value; the message lists the names and the nearest one.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import Literal
      >>> @dataclass(frozen=True)
      ... class Reading:
      ...     order: Literal["left", "right"] = "left"
      ...
      ...     def __post_init__(self):
      ...         check_literals(self)
      >>> Reading("rigth")
      Traceback (most recent call last):
      ValueError: order='rigth' is none of ['left', 'right']; the nearest name is right.
    """
    for name, choice in _choices(type(config)).items():
        value = getattr(config, name)
        if choice.repeated:
            for index, entry in enumerate(value):
                _check(f"{name}[{index}]", entry, choice)
        else:
            _check(name, value, choice)


def check_least(config: Any, **least: float) -> None:
    """Raises ValueError, with name and value, for a field that is less than its bound; None passes.

    Example:
      >>> check_least(types.SimpleNamespace(length=0), length=1)
      Traceback (most recent call last):
      ValueError: length=0 is too small; use 1 or more.
    """
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and not value >= bound:  # NaN is neither.
            raise ValueError(f"{name}={value} is too small; use {bound} or more.")


def check_above_0(config: Any, *names: str) -> None:
    """Raises ValueError, with name and value, for a field that is neither None nor above 0."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:  # NaN is not.
            raise ValueError(f"{name}={value} must be above 0.")


def check_share(config: Any, name: str, *, zero: bool = True, one: bool = True) -> None:
    """Raises ValueError, with name and value, for a field outside 0 to 1; None passes.

    Args:
      config: that has the field.
      name: of the field.
      zero: whether it may be 0.
      one: whether it may be 1.
    """
    value = getattr(config, name)
    if value is None or 0 < value < 1 or (zero and value == 0) or (one and value == 1):
        return
    out = [end for end, may_be in (("0", zero), ("1", one)) if not may_be]
    excluded = f", {' and '.join(out)} excluded" if out else ""
    raise ValueError(f"{name}={value} must lie between 0 and 1{excluded}.")


def check_seed(seed: int) -> None:
    """Raises ValueError unless `jax.random.key` takes the seed without cutting it.

    Example:
      >>> check_seed(-1)
      Traceback (most recent call last):
      ValueError: seed=-1 must lie between 0 and 2147483647.
    """
    if not 0 <= seed < 2**31:
        raise ValueError(f"seed={seed} must lie between 0 and {2**31 - 1}.")


class _Choice(NamedTuple):
    """What a field takes: the values listed, and whether values that are no strings may be others.

    `repeated` is for a tuple whose entries are described.
    """

    values: tuple[Any, ...]
    others: bool
    repeated: bool = False


def _check(name: str, value: Any, choice: _Choice) -> None:
    listed = any(type(value) is type(one) and value == one for one in choice.values)
    if listed or (choice.others and not isinstance(value, str)):
        return
    hint = nearest(str(value), [str(one) for one in choice.values if one is not None])
    raise ValueError(f"{name}={value!r} is none of {list(choice.values)}{hint}.")


@functools.cache  # Resolving annotations is slow.
def _choices(cls: type) -> dict[str, _Choice]:
    """The fields of a dataclass that list values, by name."""
    hints = typing.get_type_hints(cls)
    found = {f.name: _choice(hints[f.name]) for f in dataclasses.fields(cls)}
    return {name: choice for name, choice in found.items() if choice is not None}


def _choice(annotation: Any) -> _Choice | None:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _Choice(arguments, others=False)
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        entry = _choice(arguments[0])
        return None if entry is None else entry._replace(repeated=True)
    if origin in (Union, types.UnionType):
        literals = [typing.get_args(x) for x in arguments if typing.get_origin(x) is Literal]
        plain = [x for x in arguments if typing.get_origin(x) is not Literal]
        if not literals or str in plain:
            return None
        values = sum(literals, ())
        if types.NoneType in plain:
            values += (None,)
        return _Choice(values, others=any(x is not types.NoneType for x in plain))
    return None
