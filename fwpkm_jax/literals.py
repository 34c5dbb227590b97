"""What the fields of a configuration may be, and the words of messages about names."""

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union


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


class Bound(NamedTuple):
    """Between which ends a number lies, as a part of its annotation.

    Attributes:
      low: the lower end.
      high: the upper end.
      excluded: the ends that it may not be.
    """

    low: float
    high: float = math.inf
    excluded: tuple[float, ...] = ()

    def refusal(self, value: float) -> str | None:
        """None, or what a message says of a number that lies elsewhere, as NaN does."""
        if self.low <= value <= self.high and value not in self.excluded:
            return None
        if self.high == math.inf:
            least = f"is too small; use {self.low} or more"
            return f"must be above {self.low}" if self.excluded else least
        ends = f", {' and '.join(map(str, self.excluded))} excluded" if self.excluded else ""
        return f"must lie between {self.low} and {self.high}{ends}"


Count = Annotated[int, Bound(1)]
Natural = Annotated[int, Bound(0)]
NotNegative = Annotated[float, Bound(0)]
Positive = Annotated[float, Bound(0, excluded=(0,))]
Share = Annotated[float, Bound(0, 1)]
ShareAboveZero = Annotated[float, Bound(0, 1, excluded=(0,))]
OpenShare = Annotated[float, Bound(0, 1, excluded=(0, 1))]


class Checked:
    """A dataclass below it checks its fields by `check_fields` when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any) -> None:
    """Checks the fields of a dataclass by their annotations.

    Call it first in `__post_init__`, so that a misspelt name never reaches a computation.

    Args:
      config: an instance of a dataclass. A field counts where its annotation is a `Literal`, has a
        `Bound` (`Count`, `Share`), is a union with one (`Count | Literal["flush"]`), or a tuple of
        literals. None passes a bound.

    Raises:
      ValueError: a field has another value; the message names both and what it may be.

    Example:
      >>> from dataclasses import dataclass
      >>> from typing import Literal
      >>> @dataclass(frozen=True)
      ... class Reading(Checked):
      ...     order: Literal["left", "right"] = "left"
      ...     length: Count = 1
      >>> Reading("rigth")
      Traceback (most recent call last):
      ValueError: order='rigth' is none of ['left', 'right']; the nearest name is right.
      >>> Reading(length=0)
      Traceback (most recent call last):
      ValueError: length=0 is too small; use 1 or more.
    """
    for name, choice in _choices(type(config)).items():
        value = getattr(config, name)
        if choice.repeated:
            for index, entry in enumerate(value):
                _check(f"{name}[{index}]", entry, choice)
        else:
            _check(name, value, choice)
    for name, bound in _bounds(type(config)).items():
        value = getattr(config, name)
        refusal = bound.refusal(value) if isinstance(value, int | float) else None
        if refusal is not None:
            raise ValueError(f"{name}={value} {refusal}.")


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


@functools.cache
def _bounds(cls: type) -> dict[str, Bound]:
    """The fields of a dataclass whose annotations have a bound, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {f.name: _bound(hints[f.name]) for f in dataclasses.fields(cls)}
    return {name: bound for name, bound in found.items() if bound is not None}


def _bound(annotation: Any) -> Bound | None:
    """The bound of an annotation, or of a part of a union."""
    parts = [annotation, *typing.get_args(annotation)]
    found = (x for part in parts for x in getattr(part, "__metadata__", ()))
    return next((x for x in found if isinstance(x, Bound)), None)


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
