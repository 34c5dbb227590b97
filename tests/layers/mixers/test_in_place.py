"""The MLP with a written down projection: the learned convolution, the chunk that is not read."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.mixers import InPlaceConfig, InPlaceMLP
from fwpkm_jax.testing import check_mixer

SMALL = {"hidden_dim": 5, "chunk_size": 4, "learning_rate": 20.0}


@dataclass(frozen=True, kw_only=True)
class Trained(InPlaceConfig):
    """A convolution that is no longer 0, so that its targets are seen."""

    def build(self, model_dim: int, **shared) -> InPlaceMLP:
        layer = super().build(model_dim, **shared)
        taps = np.random.default_rng(0).normal(size=(self.conv_width, model_dim))
        assert layer.target_conv is not None
        layer.target_conv.set_value(jnp.asarray(taps, jnp.float32))
        return layer


@pytest.mark.thorough
def test_targets_of_a_convolution_keep_the_contract_of_a_mixer():
    """At any cut, with padding and in documents: targets reach two tokens to either side."""
    check_mixer(Trained(**SMALL, target="convolution"))


@pytest.mark.slow
@jax.enable_x64(True)
def test_a_stream_cut_within_a_target_equals_the_whole():
    layer = Trained(**SMALL, target="convolution").build(6, init_std=0.5, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 13, 6)))
    cache, outputs = layer.init_cache(1, max_length=13, dtype=x.dtype), []
    step = nnx.jit(lambda layer, piece, cache: layer(piece, cache=cache))
    for piece in jnp.split(x, [3, 4, 6, 9], axis=1):
        output, cache = step(layer, piece, cache)
        outputs.append(output)
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), layer(x)[0], rtol=1e-10)


@pytest.mark.slow
def test_a_chunk_reads_what_the_chunks_before_it_wrote_and_nothing_of_its_own():
    x = jax.random.normal(jax.random.key(0), (1, 11, 6))
    built = {rate: InPlaceConfig(**SMALL | {"learning_rate": rate}) for rate in (0.0, 20.0)}
    plain, written = (one.build(6, init_std=0.5, rngs=nnx.Rngs(0))(x)[0] for one in built.values())
    np.testing.assert_allclose(written[:, :4], plain[:, :4], rtol=1e-6)
    difference = np.linalg.norm(written - plain, axis=-1)[0]
    assert np.min(difference[4:]) > 1e-3


@pytest.mark.thorough
def test_a_model_with_a_convolution_starts_as_one_of_plain_mlps():
    x = jax.random.normal(jax.random.key(0), (1, 11, 6))
    layer = InPlaceConfig(**SMALL, target="convolution").build(6, rngs=nnx.Rngs(0))
    hidden = jax.nn.silu(layer.gate_proj(x)) * layer.up_proj(x)
    np.testing.assert_allclose(layer(x)[0], layer.down_proj(hidden), rtol=1e-5, atol=1e-9)
