"""What layers with a matrix memory share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.sequence.convolution import causal_convolution
from fwpkm_jax.layers.mixers.gated_delta_net import GatedDeltaNetConfig
from fwpkm_jax.layers.mixers.matrix_memory import MatrixMemoryConfig


@pytest.mark.parametrize("config", [GatedDeltaNetConfig, MatrixMemoryConfig])
def test_impossible_heads_are_named(config):
    for name in ("num_key_heads", "value_head_dim", "conv_width"):
        with pytest.raises(ValueError, match=f"{name}=0 is too small; use 1"):
            config(**{name: 0})
    with pytest.raises(ValueError, match="num_value_heads=3 is not a multiple of num_key_heads=2"):
        config(num_key_heads=2, num_value_heads=3)


def test_convolution_is_each_channels_own_and_causal():
    rng = np.random.default_rng(0)
    x, before, weight = rng.normal(size=(7, 2)), rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
    inputs = np.concatenate([before, x])
    expected = [np.convolve(inputs[:, c], weight[::-1, c], mode="valid") for c in range(2)]
    with jax.enable_x64(True):
        actual = causal_convolution(
            jnp.asarray(x)[None], jnp.asarray(before)[None], jnp.asarray(weight)
        )
    np.testing.assert_allclose(actual[0], np.stack(expected, axis=1), rtol=1e-12)
