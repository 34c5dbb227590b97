"""Failures as the user sees them."""

import numpy as np
import pytest

from fwpkm_jax.command_line import report
from fwpkm_jax.rules import FwPKM


def _caught(function):
    with pytest.raises(ValueError, match=r".") as caught:
        function()
    return caught.value


def test_a_mistake_of_the_user_is_one_line(capsys):
    error = _caught(lambda: FwPKM(key_dim=7))
    assert report("train.py", error) == 2
    assert capsys.readouterr().err == f"train.py: {error}\n"


def test_an_error_inside_a_library_keeps_its_traceback(capsys):
    error = _caught(lambda: np.reshape(np.zeros(3), (2, 2)))
    assert report("train.py", error) == 1
    assert "Traceback" in capsys.readouterr().err
