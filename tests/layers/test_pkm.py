"""The slow product-key memory: all slots scored by brute force, one softmax per head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.pkm import PKM, PKMConfig

CONFIG = PKMConfig(num_subkeys=4, key_dim=6, value_dim=5, num_heads=2, top_k=3)


def test_the_read_is_a_softmax_over_each_heads_best_slots():
    layer = PKM(CONFIG, 8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (1, 7, 8))
    out, slot_ids = jax.jit(lambda x: layer(x))(x)

    as_numpy = lambda p: np.asarray(p[...], np.float64)  # noqa: E731
    tokens = np.asarray(x[0], np.float64)
    query = tokens @ as_numpy(layer.query_proj.kernel) + as_numpy(layer.query_proj.bias)
    query /= np.sqrt(np.mean(query**2, axis=-1, keepdims=True) + 1e-6)
    query = (query * as_numpy(layer.query_scale)).reshape(7, 2, 2, 3)
    keys, values = as_numpy(layer.keys), as_numpy(layer.values)
    read = np.zeros((7, 5))
    for token in range(7):
        for head in range(2):
            rows = keys[head, 0] @ query[token, head, 0]
            columns = keys[head, 1] @ query[token, head, 1]
            scores = (rows[:, None] + columns[None]).reshape(-1)
            best = np.argsort(-scores)[:3]
            np.testing.assert_array_equal(slot_ids[0, token, 3 * head : 3 * head + 3], best)
            weights = np.exp(scores[best] - scores[best].max())
            read[token] += weights / weights.sum() @ values[best]
    gate = tokens @ as_numpy(layer.gate_proj.kernel) + as_numpy(layer.gate_proj.bias)
    read = read * gate / (1 + np.exp(-gate))
    expected = read @ as_numpy(layer.out_proj.kernel) + as_numpy(layer.out_proj.bias)
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-5)


def test_keys_and_values_learn_where_they_are_read():
    layer = PKM(CONFIG, 8, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (1, 2, 8))
    grads = jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(x)[0] ** 2))(params)
    _, slot_ids = layer(x)
    touched = np.unique(slot_ids)
    moved = np.any(np.asarray(grads["values"][...]) != 0, axis=-1)
    np.testing.assert_array_equal(np.flatnonzero(moved), touched)
    assert np.any(np.asarray(grads["keys"][...]) != 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_dim": 5}, "key_dim=5 must be even"),
        ({"top_k": 9}, "top_k=9 must lie between 1 and num_subkeys=8"),
        ({"num_heads": 0}, "num_heads=0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PKMConfig(**{"num_subkeys": 8, "top_k": 2} | change)
