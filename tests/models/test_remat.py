"""Rematerialisation: the same results, and no memory is written twice."""

from dataclasses import replace
from typing import get_args

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.models.language_model import LanguageModel
from fwpkm_jax.models.remat import Remat
from fwpkm_jax.run.setup import make_setup
from tests.models.test_language_model import CONFIG
from tests.training.tiny_config import get_config

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


@pytest.fixture(scope="module")
def kept(arrays):
    graphdef, *arrays = arrays
    return jax.jit(gradients(graphdef, None))(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("remat", get_args(Remat))
def test_loss_gradients_and_memories_are_the_same(arrays, kept, remat):
    graphdef, *arrays = arrays
    again = jax.jit(gradients(graphdef, remat))(*arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10), again, kept)


@pytest.fixture(scope="module")
def mlp():
    """A layer with attention and an MLP: its gradient, and an input."""
    model = LanguageModel(
        replace(CONFIG, mixers=("swa",), memory_layers=(), pkm_layers=()), rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(model)

    def loss(params, remat):
        hidden = nnx.merge(graphdef, params).hidden(jnp.asarray(TOKENS), {}, remat=remat)
        return jnp.sum(jnp.sin(hidden.x))

    return lambda remat: lambda params: jax.vjp(lambda x: loss(x, remat), params), params


@pytest.mark.slow
def test_each_policy_keeps_what_it_names(mlp):
    """Counts what crosses from the forward pass to the backward pass besides the weights."""
    vjp, params = mlp
    kept = {}
    for remat in (None, *get_args(Remat)):
        jaxpr = jax.make_jaxpr(lambda x, remat=remat: vjp(remat)(x)[1])(params).jaxpr
        found = {x: None for x in jaxpr.outvars if isinstance(x, jax.extend.core.Var)}
        arrays = [x.aval for x in found if x not in jaxpr.invars]
        memories = [str(getattr(x, "memory_space", "")).lower() for x in arrays]
        kept[remat] = [
            x.shape for x, place in zip(arrays, memories, strict=True) if "host" not in place
        ]
        kept[f"{remat} host"] = [
            x.shape for x, place in zip(arrays, memories, strict=True) if "host" in place
        ]
    width, hidden = CONFIG.model_dim, CONFIG.mlp_dim
    model, wide = (*TOKENS.shape, width), (*TOKENS.shape, hidden)
    assert kept["block"].count(wide) == kept["offload"].count(wide) == 0
    assert kept["names"].count(wide) == kept["dots"].count(wide) == 2
    assert kept["offload host"].count(wide) == 2
    assert kept["offload host"].count(model) == 2
    assert kept["names"].count(model) == kept["block"].count(model) + 1
    assert kept["offload"].count(model) == kept["block"].count(model) - 1
    sizes = {remat: sum(map(np.prod, kept[remat])) for remat in (None, *get_args(Remat))}
    assert sizes["offload"] < sizes["block"] < sizes["names"] < sizes["dots"] < sizes[None]


def test_offload_is_refused_where_the_host_has_the_only_memory():
    """Before a run begins: XLA for CPUs would compile it, and move nothing."""
    experiment = get_config()
    training = replace(experiment.training, remat="offload")
    with pytest.raises(ValueError, match=r"training.remat=offload .* cpu has no memory of its own"):
        make_setup(replace(experiment, training=training))


@pytest.mark.slow
def test_every_layer_is_computed_again_and_no_memory(arrays):
    """Checks the inputs of the recomputation: a memory would add its old table."""
    graphdef, *arrays = arrays
    jaxpr = jax.make_jaxpr(gradients(graphdef, "block"))(*arrays).jaxpr
    again = [equation for equation in jaxpr.eqns if equation.params.get("differentiated")]
    assert len(again) == len(MODEL.mixers)
    tables = {leaf.shape for leaf in jax.tree.leaves(arrays[1])}
    assert not tables & {x.aval.shape for equation in again for x in equation.invars}
