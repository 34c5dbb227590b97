"""Both keep the contracts of their interfaces."""

import pytest
from own_memory import Hebbian, MovingAverageConfig

from fwpkm_jax.testing import check_mixer, check_rule


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_rule(lookahead):
    check_rule(Hebbian(key_dim=4, value_dim=3, lookahead=lookahead))


def test_the_mixer():
    check_mixer(MovingAverageConfig())


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"rate=0 must lie"):
        Hebbian(rate=0)
    with pytest.raises(ValueError, match=r"start=1 must lie"):
        MovingAverageConfig(start=1)
