"""In this folder implicit promotion of dtypes is an error, and `float64` switches on doubles."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield
