"""What a stream takes is known before it is allocated."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.stream_size import checked_start
from tests.evaluation.conftest import tiny_model_config


@pytest.mark.by_default("changes1-2147483647-max_length=2147483647")
@pytest.mark.parametrize(
    ("changes", "max_length", "said"),
    [
        ({"window": 2**31 - 1}, 8, "window=2147483647"),
        ({"mixers": ("attention", "swa")}, 2**31 - 1, "max_length=2147483647"),
    ],
)
def test_caches_that_no_machine_holds_are_refused_before_they_are_made(changes, max_length, said):
    config = dataclasses.replace(tiny_model_config(), memory_layers=(), **changes)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"would take [\d,.]+ GiB, layer_0.*{said}"):
        model.init_stream({}, batch=64, max_length=max_length)


def test_a_large_cache_that_fits_is_made(monkeypatch):
    monkeypatch.setattr("fwpkm_jax.models.stream_size.device_bytes", lambda devices: 100)

    def build(size):
        return {"layer_0": jnp.zeros(size, jnp.int8)}

    options = {"tokens": 2**20, "what": "window"}
    assert jax.tree.leaves(checked_start(lambda: build(100), **options))[0].shape == (100,)
    with pytest.raises(ValueError, match="lower window"):
        checked_start(lambda: build(101), **options)
    assert checked_start(lambda: build(101), tokens=2**20 - 1, what="")["layer_0"].shape == (101,)
