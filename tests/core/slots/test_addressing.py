"""Product-key addressing against a search over all slots, plain loops and automatic gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwpkm_jax.core.slots.keys.addressing import (
    Address,
    product_top_k,
    slot_weights,
    sub_key_scores,
)
from fwpkm_jax.core.slots.write import addressing_gradient, addressing_loss

pytestmark = pytest.mark.usefixtures("float64")
TOKENS = 5
top_k_of = jax.jit(product_top_k, static_argnames=("top_k", "score"))


def sample(*, heads=2, subkeys=4, half=3, seed=0, tokens=TOKENS):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, heads, 2 * half)), rng.normal(size=(heads, 2, subkeys, half))


def scores_by_loop(queries, keys, score):
    tokens, heads, _ = queries.shape
    _, _, subkeys, half = keys.shape
    scores = np.zeros((tokens, heads, 2, subkeys))
    for t, h, p, s in np.ndindex(scores.shape):
        query, key = queries[t, h, p * half : (p + 1) * half], keys[h, p, s]
        if score == "idw":
            scores[t, h, p, s] = -np.log(1e-3 + np.sum((query - key) ** 2))
        else:
            scores[t, h, p, s] = np.sum(query * key)
    return scores


def search_all_slots(queries, keys, top_k, score):
    """Ids and scores of the best slots, of all; the lowest slot first where scores are equal."""
    scores = scores_by_loop(queries, keys, score)
    sums = scores[:, :, 0, :, None] + scores[:, :, 1, None, :]
    sums = sums.reshape(*sums.shape[:2], -1)
    ids = np.argsort(-sums, axis=-1, kind="stable")[..., :top_k]
    return ids, np.take_along_axis(sums, ids, axis=-1)


@pytest.mark.parametrize("score", ["idw", "dot"])
def test_scores_follow_their_formulas(score):
    queries, keys = sample()
    actual = sub_key_scores(jnp.asarray(queries), jnp.asarray(keys), score=score)
    np.testing.assert_allclose(actual, scores_by_loop(queries, keys, score), rtol=1e-11, atol=1e-12)


def test_a_query_on_a_sub_key_scores_the_finite_maximum():
    keys = sample(subkeys=3)[1]
    queries = keys[:, :, 1].reshape(1, 2, -1)
    scores = sub_key_scores(jnp.asarray(queries), jnp.asarray(keys))
    np.testing.assert_allclose(scores[0, :, :, 1], -np.log(1e-3), rtol=1e-9)


@pytest.mark.thorough
@given(
    heads=st.integers(1, 2),
    subkeys=st.integers(1, 6),
    top_k=st.integers(1, 6),
    score=st.sampled_from(["idw", "dot"]),
    seed=st.integers(0, 99),
)
def test_the_best_slots_are_those_of_a_search_over_all(heads, subkeys, top_k, score, seed):
    top_k = min(top_k, subkeys)
    queries, keys = sample(heads=heads, subkeys=subkeys, seed=seed)
    address = top_k_of(jnp.asarray(queries), jnp.asarray(keys), top_k=top_k, score=score)
    ids, scores = search_all_slots(queries, keys, top_k, score)
    np.testing.assert_array_equal(address.slot_ids, ids)
    np.testing.assert_allclose(address.slot_scores, scores, rtol=1e-9, atol=1e-10)
    each = scores_by_loop(queries, keys, score)
    best = np.argsort(-each, axis=-1, kind="stable")[..., :top_k]
    np.testing.assert_array_equal(address.sub_key_ids, best)
    np.testing.assert_allclose(
        address.sub_key_scores, np.take_along_axis(each, best, axis=-1), rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize(("half", "top_k"), [(1, 3), (1, 6), (2, 4), (2, 6)])
@given(seed=st.integers(0, 99))
def test_equal_scores_go_to_the_lowest_sub_key_and_the_lowest_slot(half, top_k, seed):
    """Whole numbers tie exactly; with half = 1 products are zeros of both signs, which tie too."""
    rng = np.random.default_rng(seed)
    queries = rng.integers(-1, 2, size=(8, 2, 2 * half)).astype(np.float64)
    keys = rng.integers(-1, 2, size=(2, 2, 6, half)).astype(np.float64)
    address = top_k_of(jnp.asarray(queries), jnp.asarray(keys), top_k=top_k, score="dot")
    ids, scores = search_all_slots(queries, keys, top_k, "dot")
    np.testing.assert_array_equal(address.slot_ids, ids)
    np.testing.assert_array_equal(address.slot_scores, scores)
    best = np.argsort(-scores_by_loop(queries, keys, "dot"), axis=-1, kind="stable")[..., :top_k]
    np.testing.assert_array_equal(address.sub_key_ids, best)


@pytest.mark.parametrize(("top_k", "candidates"), [(1, 1), (8, 20), (32, 119)])
def test_only_pairs_whose_ranks_can_win_are_compared(top_k, candidates):
    queries, keys = map(jnp.asarray, sample(subkeys=32))
    jaxpr = jax.make_jaxpr(functools.partial(product_top_k, top_k=top_k))(queries, keys)
    compared = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "gt"]
    assert [shape[-2:] for shape in compared] == [(candidates, candidates)]


def test_what_does_not_fit_is_refused_with_its_numbers():
    queries, keys = map(jnp.asarray, sample(subkeys=4, half=3))
    with pytest.raises(ValueError, match=r"top_k=5 exceeds the 4 sub-keys .* lower top_k"):
        product_top_k(queries, keys, top_k=5)
    with pytest.raises(ValueError, match=r"queries is float\d+\[5, 2, 4\].*key=6"):
        product_top_k(queries[..., :4], keys, top_k=2)


def test_weights_are_one_softmax_for_a_token_or_one_for_each_head():
    scores = np.random.default_rng(0).normal(size=(3, 2, 4))
    exponentials = np.exp(scores / 0.7)
    for normalization, axes in (("token", (1, 2)), ("head", 2)):
        weights = slot_weights(jnp.asarray(scores), normalization=normalization, temperature=0.7)
        expected = exponentials / exponentials.sum(axes, keepdims=True)
        np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.by_default("1e-44")
@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-44])
def test_a_tiny_temperature_gives_all_weight_to_the_best_slot(temperature):
    scores = jnp.asarray([[[-200.0, 350.0, 325.0, 0.0]]], jnp.float32)
    weigh = functools.partial(slot_weights, temperature=temperature)
    np.testing.assert_array_equal(weigh(scores), [[[0, 1, 0, 0]]])
    assert np.all(np.isfinite(jax.grad(lambda x: weigh(x)[0, 0, 1])(scores)))


@pytest.mark.parametrize("normalization", ["token", "head"])
def test_elementwise_nonlinearities_do_not_normalise(normalization):
    scores = np.random.default_rng(0).normal(size=(3, 2, 4))
    options = {"normalization": normalization, "temperature": 2.0}
    relu = slot_weights(jnp.asarray(scores), nonlinearity="relu", **options)
    np.testing.assert_array_equal(relu, np.maximum(scores / 2, 0))
    silu = slot_weights(jnp.asarray(scores), nonlinearity="silu", **options)
    np.testing.assert_allclose(silu, scores / 2 / (1 + np.exp(-scores / 2)), rtol=1e-12)


def loss_by_loop(queries, keys, top_k, score, token_weights):
    """The negative entropy of the average access, straight from its definition."""
    scores = scores_by_loop(queries, keys, score)
    tokens, heads, _, subkeys = scores.shape
    loss = 0.0
    for p in range(2):
        average = np.zeros(subkeys)
        for t, h in np.ndindex(tokens, heads):
            best = np.argsort(-scores[t, h, p], kind="stable")[:top_k]
            access = np.exp(scores[t, h, p, best])
            average[best] += token_weights[t] * access / access.sum()
        average /= heads * token_weights.sum()
        loss += np.sum(average * np.log(average + 1e-8))
    return loss


WEIGHTS = {"all": np.ones(TOKENS), "some": np.array([1.0, 0.0, 1.0, 1.0, 0.0])}


@functools.partial(jax.jit, static_argnames=("top_k", "score"))
def loss_of(keys, queries, token_weights, *, top_k, score):
    address = product_top_k(queries, keys, top_k=top_k, score=score)
    return addressing_loss(address, num_subkeys=keys.shape[2], token_weights=token_weights)


@functools.partial(jax.jit, static_argnames=("top_k", "score"))
def written_gradient(keys, queries, token_weights, *, top_k, score):
    address = product_top_k(queries, keys, top_k=top_k, score=score)
    return addressing_gradient(queries, keys, address, token_weights=token_weights, score=score)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("score", ["idw", "dot"])
def test_addressing_loss_is_the_negative_entropy_of_the_average_access(score, weights):
    queries, keys = sample(subkeys=5)
    arrays = map(jnp.asarray, (keys, queries, WEIGHTS[weights]))
    actual = loss_of(*arrays, top_k=3, score=score)
    expected = loss_by_loop(queries, keys, 3, score, WEIGHTS[weights])
    np.testing.assert_allclose(actual, expected, rtol=1e-10)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("score", ["idw", "dot"])
def test_the_written_out_gradient_is_the_automatic_one(score, weights):
    queries, keys = sample(subkeys=5)
    arrays = tuple(map(jnp.asarray, (keys, queries, WEIGHTS[weights])))
    options = {"top_k": 3, "score": score}
    expected = jax.grad(loss_of)(*arrays, **options)
    assert np.max(np.abs(expected)) > 1e-3
    np.testing.assert_allclose(
        written_gradient(*arrays, **options), expected, rtol=1e-10, atol=1e-12
    )


@pytest.mark.thorough
@pytest.mark.parametrize("score", ["idw", "dot"])
def test_the_written_out_gradient_differentiates_like_the_automatic_one(score):
    queries, keys = sample(subkeys=5)
    arrays = tuple(map(jnp.asarray, (keys, queries, WEIGHTS["some"])))
    direction = jnp.asarray(np.random.default_rng(1).normal(size=keys.shape))

    def along(gradient):
        return lambda *arrays: jnp.sum(direction * gradient(*arrays, top_k=3, score=score))

    written = jax.jit(jax.grad(along(written_gradient), argnums=(0, 1)))(*arrays)
    automatic = jax.jit(jax.grad(along(jax.grad(loss_of)), argnums=(0, 1)))(*arrays)
    for actual, expected in zip(written, automatic, strict=True):
        assert np.max(np.abs(expected)) > 1e-3
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_without_any_token_loss_and_gradient_are_zero():
    queries, keys = sample()
    arrays = tuple(map(jnp.asarray, (keys, queries, np.zeros(TOKENS))))
    options = {"top_k": 2, "score": "idw"}
    np.testing.assert_array_equal(loss_of(*arrays, **options), 0)
    np.testing.assert_array_equal(written_gradient(*arrays, **options), 0)
    np.testing.assert_array_equal(jax.grad(loss_of)(*arrays, **options), 0)


@pytest.mark.thorough
def test_even_use_of_all_sub_keys_reaches_the_least_loss():
    subkeys = 4
    ids = np.arange(subkeys).reshape(subkeys, 1, 1, 1).repeat(2, axis=2)
    scores = jnp.zeros((subkeys, 1, 2, 1))
    address = Address(jnp.asarray(ids[:, :, 0]), scores[:, :, 0], jnp.asarray(ids), scores)
    loss = addressing_loss(address, num_subkeys=subkeys, token_weights=jnp.ones(subkeys))
    np.testing.assert_allclose(loss, -2 * np.log(subkeys), atol=1e-6)
