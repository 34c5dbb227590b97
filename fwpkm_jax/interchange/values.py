"""The values of a `config.json`, checked as they are read."""

from collections.abc import Mapping
from typing import Any

from fwpkm_jax.io.untrusted import shown

MOST_SIZE = 2**31 - 1  # What devices count in.


class Values:
    """The keys of one file, with the defaults that the library has for them."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._values, self._defaults = values, defaults

    def given(self, key: str) -> bool:
        """Whether the file has the key, if only as null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Whether the file has the key, as null."""
        return self.given(key) and self._values[key] is None

    def get(self, key: str) -> Any:
        """A key's value; None in a file stands for the default where there is one."""
        value = self._values.get(key)
        return self._defaults.get(key) if value is None else value

    def count(self, key: str, *, least: int = 1, most: int = MOST_SIZE) -> int:
        """The value of a key that must have one, as an integer."""
        return count(self.get(key), key, least=least, most=most)

    def optional_count(self, key: str) -> int | None:
        """The value of a key that may be missing, null or zero, each of which means None."""
        value = self.get(key)
        return count(value, key, least=0) or None if value is not None else None

    def real(self, key: str) -> float:
        """The value of a key that must have one, as a number."""
        return real(self.get(key), key)

    def flag(self, key: str) -> bool:
        """The value of a key that is true or false; a missing one is false."""
        value = self.get(key)
        if value not in (None, True, False):
            raise ValueError(f"{key}={shown(repr(value), 60)} must be true or false.")
        return bool(value)

    def object(self, key: str) -> dict[str, Any]:
        """The value of a key that is an object, empty where it is missing or null."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{key}={shown(repr(value), 60)} must be an object.")
        return dict(value)


def count(value: Any, key: str, *, least: int = 1, most: int = MOST_SIZE) -> int:
    """An integer of a file, within bounds."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{key}={shown(repr(value), 60)} must be an integer from {least} to {most}."
        )
    return value


def real(value: Any, key: str) -> float:
    """A number of a file that is finite in float32."""
    if type(value) not in (int, float) or not abs(value) < 3e38:
        raise ValueError(f"{key}={shown(repr(value), 60)} must be a finite number.")
    return float(value)
