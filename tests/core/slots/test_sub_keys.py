"""Sums over chosen sub-keys: both ways of computing them, and their derivatives."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.core.slots.keys import sums as sub_keys

pytestmark = pytest.mark.usefixtures("float64")
TOKENS, HEADS, SUBKEYS, TOP_K, HALF = 40, 2, 7, 3, 4


def sample():
    rng = np.random.default_rng(0)
    shape = (TOKENS, HEADS, 2)
    ids = np.argsort(rng.random((*shape, SUBKEYS)), axis=-1)[..., :TOP_K]
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    keys = draw(HEADS, 2, SUBKEYS, HALF)
    return draw(*shape, TOP_K), jnp.asarray(ids, jnp.int32), draw(*shape, HALF), keys


def loops(coefficients, ids, vectors, keys):
    """The totals, additions, sums and inner products, one chosen sub-key after the other."""
    totals, added = np.zeros(keys.shape[:3]), np.zeros(keys.shape)
    sums, dots = np.zeros(vectors.shape), np.zeros(coefficients.shape)
    for t, h, p, i in np.ndindex(*ids.shape):
        s, c = ids[t, h, p, i], coefficients[t, h, p, i]
        totals[h, p, s] += c
        added[h, p, s] += c * vectors[t, h, p]
        sums[t, h, p] += c * keys[h, p, s]
        dots[t, h, p, i] = vectors[t, h, p] @ keys[h, p, s]
    return totals, added, sums, dots


@pytest.mark.slow
def test_rows_and_products_are_the_loops():
    c, ids, vectors, keys = sample()
    expected = loops(*map(np.asarray, (c, ids, vectors, keys)))
    for device in ("cpu", "tpu"):
        with compiled_for(device):
            found = (
                sub_keys.sub_key_totals(c, ids, SUBKEYS),
                sub_keys.add_to_sub_keys(c, ids, vectors, SUBKEYS),
                sub_keys.sum_of_sub_keys(c, ids, keys),
                sub_keys.dots_of_sub_keys(vectors, ids, keys),
            )
        chex.assert_trees_all_close(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_first_and_second_derivatives_are_the_automatic_ones():
    c, ids, vectors, keys = sample()

    def loss(add, total, c, vectors, keys):
        moved = keys - jnp.tanh(add(c, ids, vectors, SUBKEYS))
        return jnp.sum(jnp.sin(total(c, ids, moved)))

    def slope(add, total):
        def squared(*inputs):
            gradients = jax.grad(lambda *x: loss(add, total, *x), argnums=(0, 1, 2))(*inputs)
            return sum(jnp.sum(g**2) for g in gradients)

        return jax.jit(jax.value_and_grad(squared, argnums=(0, 1, 2)))(c, vectors, keys)

    ours = slope(sub_keys.add_to_sub_keys, sub_keys.sum_of_sub_keys)
    # Without their rules of derivatives, the functions themselves.
    with compiled_for("tpu"):
        automatic = slope(sub_keys.add_to_sub_keys.fun, sub_keys.sum_of_sub_keys.fun)
    chex.assert_trees_all_close(ours, automatic, rtol=1e-10, atol=1e-10)


def test_only_a_gpu_multiplies_float32_in_three_products(monkeypatch):
    arrays = sample()
    narrow = jax.tree.map(lambda x: x.astype(x.dtype if x.dtype == jnp.int32 else "f4"), arrays)

    def gradients(c, ids, vectors, keys):
        def total(c, vectors, keys):
            moved = keys + sub_keys.add_to_sub_keys(c, ids, vectors, SUBKEYS)
            return jnp.sum(sub_keys.sum_of_sub_keys(c, ids, moved) ** 2)

        return jax.grad(total, argnums=(0, 1, 2))(c, vectors, keys)

    def three_products(platform, arrays):
        fresh = jax.jit(lambda *arrays: gradients(*arrays))  # Not traced for another device.
        with compiled_for(platform):
            text = fresh.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("num_primitive_operations = 3")

    assert three_products("gpu", narrow) == 6  # All: each of both calls, and its two cotangents.
    assert three_products("gpu", arrays) == three_products("tpu", narrow) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for capability, products in (("7.5", 0), ("12.0", 6)):
        device = types.SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert three_products("gpu", narrow) == products
