"""Rows of embeddings: ids outside the table, and what XLA adds up by itself."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax import LanguageModel, ModelConfig
from pallas_kernels import dispatch
from pallas_kernels.embed import embed
from tests.kernels.entry import equations

VOCAB, WIDTH = 8, 128


@pytest.mark.slow_cases("tokens0")
@pytest.mark.thorough("tokens0", "tokens1")
@pytest.mark.parametrize("tokens", [[0, -1, -8], [8, 1, 1], [-9, 0, 2]])
def test_ids_outside_the_table_give_nan_and_no_gradient(tokens):
    table = jax.random.normal(jax.random.key(0), (VOCAB, WIDTH))
    tokens = jnp.array(tokens)

    def rows_and_gradient(backend):
        rows, back = jax.vjp(lambda table: embed(table, tokens, backend=backend), table)
        return rows, back(jnp.cos(jnp.arange(rows.size)).reshape(rows.shape))[0]

    expected = rows_and_gradient("reference")
    with dispatch.interpret_kernels("gpu"):
        actual = jax.jit(rows_and_gradient, static_argnums=0)("pallas")
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), actual, expected)
    outside = (np.array(tokens) >= VOCAB) | (np.array(tokens) < -VOCAB)
    np.testing.assert_array_equal(np.isnan(actual[0]).all(-1), outside)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "vocab"), [(jnp.uint8, 256), (jnp.uint8, 300)])
def test_unsigned_ids_keep_their_gradients(dtype, vocab):
    table, ids = jnp.ones((vocab, WIDTH)), [1, 50, 200, 255]
    tokens = jnp.array(ids, dtype)
    with dispatch.interpret_kernels("gpu"):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(embed(x, tokens, backend="pallas"))))(table)
    np.testing.assert_array_equal(np.flatnonzero(gradient.sum(1)), ids)


@pytest.mark.slow
def test_rows_can_be_batched_and_differentiated_twice():
    tables = jax.random.normal(jax.random.key(0), (2, VOCAB, WIDTH))
    tokens = jnp.array([[0, 3, 3], [1, 1, 7]])

    def of_gradient(backend):
        def loss(table, tokens):
            return jnp.sum(embed(table, tokens, backend=backend) ** 3)

        def slope(table, tokens):
            return jnp.sum(jax.grad(loss)(table, tokens) ** 2)

        return jax.vmap(jax.grad(slope))(tables, tokens)

    with dispatch.interpret_kernels("gpu"):
        actual = jax.jit(of_gradient, static_argnums=0)("pallas")
    np.testing.assert_allclose(actual, of_gradient("reference"), rtol=1e-4)


@pytest.mark.slow
def test_a_nan_of_an_id_outside_the_table_stays_out_of_its_gradient():
    table, tokens = jnp.ones((VOCAB, WIDTH)), jnp.array([0, VOCAB])
    with dispatch.interpret_kernels("gpu"):
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(embed(x, tokens, backend="pallas") ** 2)))
        gradient = gradient(table)
    np.testing.assert_array_equal(gradient, 2.0 * (jnp.arange(VOCAB) == 0)[:, None] * table)


@functools.cache
def model():
    config = ModelConfig(
        vocab_size=48, model_dim=WIDTH, mixers=("swa",), mlp_dim=16, memory_layers=(), pkm_layers=()
    )
    return nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", [None, "gpu"])
def test_a_models_embedding_has_no_gradient_from_atomic_additions(kernel):
    graph, params = model()

    def loss(params, tokens):
        return jnp.sum(nnx.merge(graph, params)(tokens, {}).logits)

    tokens = jnp.zeros((2, 64), jnp.int32)
    with contextlib.nullcontext() if kernel is None else dispatch.compile_kernels(kernel):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(params, tokens)
    added = [
        equation
        for equation in equations(jaxpr.jaxpr)
        if equation.primitive.name == "scatter-add"
        and equation.outvars[0].aval.shape == params.embedding[...].shape
    ]
    assert len(added) == (1 if kernel is None else 0)
