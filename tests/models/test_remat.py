"""Rematerialisation: the same results, and no memory is written twice."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from tests.models.test_language_model import CONFIG

MODEL = replace(CONFIG, mixers=("gdn",), memory_layers=(0,), pkm_layers=(0,))
TOKENS = np.random.default_rng(0).integers(MODEL.vocab_size, size=(2, 7))
MASK = np.ones((2, 7)) - np.eye(2, 7, k=5)  # One padded token, not in the last place.


@pytest.fixture(scope="module")
def arrays():
    with jax.enable_x64(True):
        model = LanguageModel(MODEL, rngs=nnx.Rngs(0), dtype=None)
        graphdef, params = nnx.split(model)
        double = jax.tree.map(
            lambda x: x.astype(jnp.float64), (params, model.init_memory(jax.random.key(1)))
        )
        yield graphdef, *double


def gradients(graphdef, remat):
    def loss_and_written(params, memory):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(jnp.asarray(TOKENS), memory, mask=jnp.asarray(MASK), remat=remat)
        return jnp.sum(MASK[..., None] * jnp.sin(hidden.x)), (hidden.memory, hidden.info)

    return jax.value_and_grad(loss_and_written, has_aux=True)


@pytest.mark.thorough
def test_loss_gradients_and_memories_are_the_same(arrays):
    graphdef, *arrays = arrays
    kept, again = (jax.jit(gradients(graphdef, remat))(*arrays) for remat in (None, "block"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), again, kept)


@pytest.mark.thorough
def test_every_layer_is_computed_again_and_no_memory(arrays):
    """Checks the inputs of the recomputation: a memory would add its old table."""
    graphdef, *arrays = arrays
    jaxpr = jax.make_jaxpr(gradients(graphdef, "block"))(*arrays).jaxpr
    again = [equation for equation in jaxpr.eqns if equation.params.get("differentiated")]
    assert len(again) == len(MODEL.mixers)
    tables = {leaf.shape for leaf in jax.tree.leaves(arrays[1])}
    assert not tables & {x.aval.shape for equation in again for x in equation.invars}
