"""Low-rank updates: the same output at first, the stated sum later, plain matrices when merged."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.lora import LoRAConfig, LoRALinear, merged
from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.training.state import named_leaves
from tests.training.tiny_config import get_config

MODEL = dataclasses.replace(get_config().model, parameter_dtype="bfloat16", mlp_bias=True)


def shapes_of(**changes):
    model = dataclasses.replace(MODEL, **changes)
    made = nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0)))
    return named_leaves(nnx.state(made))


@pytest.mark.by_default("False")
@pytest.mark.parametrize("bias", [True, False])
def test_a_map_with_an_update_computes_the_stated_sum_and_its_merged_kernel_does_too(bias):
    rng = np.random.default_rng(0)
    config = LoRAConfig(rank=2, alpha=3.0)
    linear = nnx.Linear(5, 4, use_bias=bias, rngs=nnx.Rngs(0))
    if bias:
        linear.bias[...] = jnp.asarray(rng.normal(size=4), jnp.float32)
    updated = LoRALinear(linear, config, rngs=nnx.Rngs(1))
    x = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    np.testing.assert_array_equal(updated(x), linear(x))
    a = np.asarray(updated.lora_a[...])
    assert 0 < np.abs(a).max() <= 5**-0.5
    updated.lora_b[...] = b = rng.normal(size=(2, 4)).astype(np.float32)
    kernel = np.asarray(linear.kernel[...], np.float64) + 1.5 * (a.astype(np.float64) @ b)
    expected = np.asarray(x) @ kernel + (np.asarray(linear.bias[...]) if bias else 0)
    np.testing.assert_allclose(updated(x), expected, rtol=1e-5, atol=1e-6)
    named = {f"block/{name}": x for name, x in named_leaves(nnx.state(updated)).items()}
    plain = merged(named, config)
    assert plain.keys() == {f"block/{name}" for name in named_leaves(nnx.state(linear))}
    np.testing.assert_allclose(plain["block/kernel"], kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_updates_stand_beside_the_maps_that_match_and_stay_float32():
    before, after = shapes_of(), shapes_of(lora=LoRAConfig(maps=(".*/[qo]_proj",), rank=3))
    added = {name: x for name, x in after.items() if name not in before}
    assert {name: x.shape for name, x in added.items()} == {
        f"blocks/{layer}/mixer/{name}": shape
        for layer in (0, 1)
        for name, shape in {
            "q_proj/lora_a": (16, 3), "q_proj/lora_b": (3, 32),
            "o_proj/lora_a": (16, 3), "o_proj/lora_b": (3, 16),
        }.items()
    }  # fmt: skip
    assert {x.dtype for x in added.values()} == {jnp.dtype("float32")}
    assert {n: (x.shape, x.dtype) for n, x in after.items() if n not in added} == {
        n: (x.shape, x.dtype) for n, x in before.items()
    }
    whole = shapes_of(lora=LoRAConfig())
    changed = {name.rsplit("/", 1)[0] for name in whole if name.endswith("lora_b")}
    kernels = {name.removesuffix("/kernel") for name in before if name.endswith("_proj/kernel")}
    assert changed == {name for name in kernels if "/memory/" not in name}


def test_a_pattern_that_matches_nothing_or_a_size_that_means_nothing_is_refused():
    with pytest.raises(ValueError, match=r"lora\.maps: 'q_proj' matches no linear map; .*_proj"):
        shapes_of(lora=LoRAConfig(maps=("q_proj",)))
    for options in ({"maps": ()}, {"maps": ("(",)}, {"rank": 0}, {"alpha": 0.0}):
        with pytest.raises(ValueError, match=re.escape(next(iter(options)))):
            LoRAConfig(**options)


def test_the_update_is_computed_in_the_dtype_of_the_map():
    linear = nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    updated = LoRALinear(linear, LoRAConfig(), rngs=nnx.Rngs(1))
    assert jax.eval_shape(updated, jnp.ones((2, 4))).dtype == jnp.bfloat16
