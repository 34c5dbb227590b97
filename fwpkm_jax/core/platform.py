"""The device that is compiled for, and the form of an operation for it.

The form is chosen while a function is traced, so a program holds one form only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

Form = TypeVar("Form", bound=Callable)

# A user context is part of jit's cache key: a function traced for one device is retraced for
# another.
_compiled_for = jax.make_user_context(None)


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what is traced now will run there."""
    return _compiled_for.value or jax.default_backend()


def by_platform(*, default: Form, **forms: Form) -> Form:
    """An operation's form for this device.

    Args:
      default: for devices that have no form of their own.
      **forms: by the name of the device: `cpu`, `gpu` or `tpu`.
    """
    return forms.get(platform(), default)


@contextlib.contextmanager
def compiled_for(device: str) -> Iterator[None]:
    """Inside, functions are traced for this kind of device, wherever this process runs."""
    with _compiled_for(device):
        yield
