"""What is imported when it is first used: public names, entries of registries, extras' packages."""

import ast
import importlib
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562), which import its names on first use.

    Which names there are, and where, say the imports below `if TYPE_CHECKING:` in its file: a type
    checker reads them, and so does this function.
    """
    homes = {
        alias.name: f"{node.module}"
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # The next use finds it without this function.
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


class LazyRegistry(UserDict[str, Any]):
    """Objects by name; one that stands as `module:NAME` is imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]
        if isinstance(found, str):
            module, attribute = found.split(":")
            self.data[name] = found = getattr(importlib.import_module(module), attribute)
        return found


def import_extra(name: str, what: str, *, extra: str) -> Any:
    """A package, or a module in it, that one of this package's extras installs.

    Args:
      what: what it does, for the message: "Chat templates are filled in".

    Raises:
      ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{what} by the package {name.split('.')[0]}, which is not installed; in a checkout of "
            f"fwpkm_jax run: pip install -e '.[{extra}]'"
        ) from error
