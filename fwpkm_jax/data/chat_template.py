"""Fills in chat templates with Jinja's own sandbox.

A chat template is a program that comes with a model. The sandbox keeps it from files and from
Python's functions, and what it writes is bounded; its time and its memory are not.
"""

import datetime
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

MOST_TEXT = 2**24
"""Characters that a template may write."""


class TemplateFailedError(Exception):
    """A template cannot be filled in; the message says why, in a clause."""


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text that a template writes.

    Args:
      template: in Jinja's language, as the transformers library fills it in.
      values: JSON values by the names that the template uses.

    Raises:
      TemplateFailedError: it refuses the values, is wrong, or writes more than `MOST_TEXT`
        characters.
    """
    pieces, size = [], 0
    try:
        for piece in _compiled(template).generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_TEXT:
                raise TemplateFailedError(f"it writes more than {MOST_TEXT:,} characters")
    except TemplateFailedError:
        raise
    except RecursionError as error:
        raise TemplateFailedError("it calls itself too often") from error
    except Exception as error:  # A template's own errors are of any kind.
        known = type(error).__module__.startswith("jinja2")
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        raise TemplateFailedError(reason[:1000]) from error
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Compiled once: that takes longer than to fill it in."""
    return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
    """A sandbox whose templates see their values and these functions."""
    jinja2, sandbox = map(importlib.import_module, ("jinja2", "jinja2.sandbox"))

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
