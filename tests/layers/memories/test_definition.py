"""The memory layer equals its definition, gradients included."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.layers.memories.definition import read_and_write
from fwpkm_jax.rules import FwMLP
from tests.layers.memory_block import BATCH, CONFIG, LENGTH, layer_of, params_of, sample, start

pytestmark = pytest.mark.usefixtures("float64")
OPTIONS = {
    "default": {},
    "loss without gate": {"weight_by_gate": False},
    "output without gate": {"gate_output": False},
    "gated residual": {"gate_residual": True},
    "small reads": {"gate_residual": True, "full_read": 0.3},
    "no gate": {"weight_by_gate": False, "gate_output": False},
    "another rule": {"rule": FwMLP.tiny()},
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def outputs_and_gradients(written_out, config, params, x, memory, mask):
    def loss(params, x):
        layer = layer_of(params, config)
        if written_out:
            y, after = read_and_write(layer, x, memory, mask)
        else:
            y, after, _ = layer(x, memory, mask=mask)
        return sum(jnp.sum(jnp.sin(3.0 * x)) for x in jax.tree.leaves((y, after))), (y, after)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)


@pytest.mark.thorough("default")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_layer_equals_its_definition(name):
    config = dataclasses.replace(CONFIG, **OPTIONS[name])
    memory = start(groups=BATCH, config=config)
    mask = jnp.ones((BATCH, LENGTH)).at[1, 4:6].set(0)
    arrays = params_of(config), sample(), memory, mask
    actual, expected = (outputs_and_gradients(out, config, *arrays) for out in (False, True))
    chex.assert_trees_all_close(actual, expected, rtol=1e-11, atol=1e-12)
    written = jax.tree.map(lambda x, y: np.any(x != y), expected[0][1][1], memory)
    assert all(jax.tree.leaves(written))
