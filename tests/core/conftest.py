"""In this folder implicit promotion of dtypes is an error."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
