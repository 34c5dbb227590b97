"""Modules of other packages that a run needs: imported where the user names them, never because a
run's file does, and found by what a configuration uses."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fwpkm_jax.io.untrusted import OutsideFileError
from fwpkm_jax.literals import some


def import_plugins(modules: Sequence[str]) -> None:
    """Imports modules that the user named on a command line.

    A module that only the current folder has is not found: it may be a stranger's.

    Raises:
      ValueError: a module is not installed.
    """
    before = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if entry not in ("", ".")]
    try:
        for module in modules:
            _import(module)
    finally:
        sys.path[:] = before


def _import(module: str) -> None:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
        raise ValueError(f"plugins={module!r} is not the name of a module, such as package.module.")
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The plugin is here, and lacks something itself.
        raise ValueError(
            f"plugins names the module {module}, which is not installed; install its package "
            "into this environment, or put its folder on PYTHONPATH."
        ) from error


def refuse_unnamed(modules: Sequence[str], path: str) -> None:
    """Checks that the modules a run's configuration names were imported, because the user said so.

    A configuration is a file that may come from anyone, and to import a module is to run it.

    Raises:
      OutsideFileError: one was not imported; the message says how to go on.
    """
    unnamed = [module for module in modules if module not in sys.modules]
    if unnamed:
        raise OutsideFileError(
            path,
            f"names plugins, which are code: {some(unnamed)}",
            otherwise="if you trust it, add `--plugins "
            f"{' '.join(unnamed[:6])}` to the command (in Python: import it first)",
        )


def missing_plugins(config: Any, plugins: Sequence[str]) -> tuple[str, ...]:
    """The modules outside this package that a configuration uses and `plugins` do not cover.

    Args:
      plugins: modules; each covers itself and what lies in its package.

    Raises:
      ValueError: a class or a registered name comes from a program, which cannot be imported.
    """
    missing: dict[str, None] = {}
    for module, what in _origins(config):
        inside = module.split(".")[0] == __name__.split(".")[0]
        if inside or any(f"{module}.".startswith(f"{plugin}.") for plugin in plugins):
            continue
        if module == "__main__" or module not in sys.modules:
            raise ValueError(
                f"{what} is defined in a program ({module}), from which a run cannot be read "
                "again; move it to a module of its own and add that module to plugins."
            )
        missing[module] = None
    return tuple(missing)


def _origins(config: Any) -> Iterator[tuple[str, str]]:
    """Module and name of each class in a configuration, and of each name that was registered."""
    if isinstance(config, tuple | list):
        for item in config:
            yield from _origins(item)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        yield type(config).__module__, type(config).__name__
        yield from getattr(config, "registered_names", ())
        for field in dataclasses.fields(config):
            yield from _origins(getattr(config, field.name))
