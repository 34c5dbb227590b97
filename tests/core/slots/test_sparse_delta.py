"""Sparse Delta Memory in chunks equals its page, which equals a few lines of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.platform import compiled_for
from fwpkm_jax.core.slots.delta.chunks import sparse_delta
from fwpkm_jax.core.slots.delta.definition import DeltaTokens, write_and_read
from fwpkm_jax.core.slots.values.exchange import PLAIN_SUMS
from pallas_kernels.dispatch import interpret_kernels
from pallas_kernels.row_ops import chosen_sums

SLOTS, VALUE = 11, 3
EXACT = 1e-12
FLOATS = ("write_weights", "read_weights", "values", "log_decay", "strength")


def sample(seed=0, *, groups=2, length=21, writes=4, reads=5, decay=1.0):
    """Tables and tokens in float64; with so few slots, many repeat within a token and a chunk."""
    rng = np.random.default_rng(seed)

    def weights(places):
        scores = np.exp(rng.normal(size=(groups, length, places)))
        return scores / scores.sum(-1, keepdims=True)

    def ids(places):
        return rng.integers(0, SLOTS, (groups, length, places)).astype(np.int32)

    tokens = DeltaTokens(
        write_ids=ids(writes),
        write_weights=weights(writes),
        read_ids=ids(reads),
        read_weights=weights(reads),
        values=rng.normal(size=(groups, length, VALUE)),
        log_decay=-decay * rng.exponential(size=(groups, length)) ** 2,
        strength=rng.uniform(size=(groups, length)),
    )
    return rng.normal(size=(groups, SLOTS, VALUE)), tokens


def by_numpy(table, tokens, *, decay):
    """One memory, with a loop over everything."""
    table, outputs = np.array(table), []
    for at in zip(*(np.asarray(x) for x in tokens), strict=True):
        write_ids, k, read_ids, q, value, log_decay, strength = at
        total = {slot: sum(k[write_ids == slot]) for slot in write_ids.tolist()}
        for slot, weight in total.items():
            table[slot] *= np.exp(log_decay * (weight if decay == "weighted" else 1.0))
        read = sum(weight * table[slot] for slot, weight in total.items())
        for slot, weight in total.items():
            table[slot] += weight * strength * (value - read)
        outputs.append(sum(weight * table[slot] for slot, weight in zip(read_ids, q, strict=True)))
    return table, np.stack(outputs)


def by_definition(tables, tokens, *, decay):
    return jax.vmap(functools.partial(write_and_read, decay=decay))(tables, tokens)


def with_gradients(run, tables, tokens, cotangents):
    @jax.jit
    def both(tables, tokens, cotangents):
        def of(tables, floats):
            return tuple(run(tables, tokens._replace(**floats)))

        out, pull = jax.vjp(of, tables, {name: getattr(tokens, name) for name in FLOATS})
        return out, pull(cotangents)

    return both(*jax.tree.map(jnp.asarray, (tables, tokens, cotangents)))


def in_single_precision(tree):
    return jax.tree.map(
        lambda x: jnp.asarray(x, x.dtype if x.dtype == np.int32 else np.float32), tree
    )


def assert_trees_close(ours, theirs, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), ours, theirs)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("decay", ["slot", "weighted"])
def test_the_page_equals_a_loop_in_numpy(decay):
    tables, tokens = sample()
    out = by_definition(tables, jax.tree.map(jnp.asarray, tokens), decay=decay)
    for group in range(2):
        table, output = by_numpy(tables[group], [x[group] for x in tokens], decay=decay)
        np.testing.assert_allclose(out.table[group], table, rtol=0, atol=EXACT)
        np.testing.assert_allclose(out.output[group], output, rtol=0, atol=EXACT)


@pytest.mark.slow_cases("1-weighted-1.0", "8-weighted-60.0")
@pytest.mark.by_default("8-slot-1.0")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("chunk_size", "decay", "strongest"),
    [(1, "weighted", 1.0), (8, "slot", 1.0), (8, "weighted", 60.0), (64, "slot", 60.0)],
)
def test_chunks_equal_the_page_gradients_included(chunk_size, decay, strongest):
    tables, tokens = sample(1, decay=strongest)
    rng = np.random.default_rng(2)
    cotangents = rng.normal(size=tables.shape), rng.normal(size=tokens.values.shape)
    chunked = functools.partial(sparse_delta, decay=decay, chunk_size=chunk_size)
    page = functools.partial(by_definition, decay=decay)
    ours, theirs = (with_gradients(run, tables, tokens, cotangents) for run in (chunked, page))
    assert_trees_close(ours, theirs, rtol=EXACT, atol=EXACT)
    for leaf in jax.tree.leaves(theirs):
        assert np.any(np.asarray(leaf) != 0)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_the_form_for_other_devices_gives_the_same():
    tables, tokens = sample(7)
    cotangents = tables[:, ::-1], tokens.values[:, ::-1]
    chunked = functools.partial(sparse_delta, chunk_size=8)
    here = with_gradients(chunked, tables, tokens, cotangents)
    with compiled_for("gpu"):
        there = with_gradients(chunked, tables, tokens, cotangents)
    assert_trees_close(there, here, rtol=EXACT, atol=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gpu", "tpu"])
def test_the_kernels_that_fwpkm_reads_and_adds_rows_with_give_the_same(kernel):
    tables, tokens = in_single_precision(sample(8, length=6))
    cotangents = tables[:, ::-1], tokens.values[:, ::-1]
    with interpret_kernels(kernel):
        sums = chosen_sums(tables, backend="pallas")
        chunked = functools.partial(sparse_delta, chunk_size=4, sums=sums)
        ours = with_gradients(chunked, tables, tokens, cotangents)
    assert sums is not PLAIN_SUMS
    plain = functools.partial(sparse_delta, chunk_size=4)
    theirs = with_gradients(plain, tables, tokens, cotangents)
    assert_trees_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("float64")
def test_only_outputs_may_have_a_gradient():
    """The loss then leaves the final tables out, and the tables themselves are constants."""
    tables, tokens = jax.tree.map(jnp.asarray, sample(3))

    def gradient(run):
        def loss(values):
            return jnp.sum(jnp.sin(run(tables, tokens._replace(values=values)).output))

        return jax.jit(jax.grad(loss))(tokens.values)

    chunked = functools.partial(sparse_delta, chunk_size=4)
    page = functools.partial(by_definition, decay="slot")
    np.testing.assert_allclose(gradient(chunked), gradient(page), rtol=EXACT, atol=EXACT)


@pytest.mark.slow
def test_single_precision_stays_close_where_slots_decay_to_nothing():
    tables, tokens = sample(4, decay=60.0)
    out = sparse_delta(*in_single_precision((tables, tokens)), chunk_size=8)
    for group in range(2):
        table, output = by_numpy(tables[group], [x[group] for x in tokens], decay="slot")
        np.testing.assert_allclose(out.table[group], table, rtol=0, atol=2e-6)
        np.testing.assert_allclose(out.output[group], output, rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_a_token_without_weights_changes_no_bit():
    tables, tokens = sample(5)
    still = {name: 0.0 * getattr(tokens, name) for name in ("write_weights", "log_decay")}
    tokens = tokens._replace(**still)
    out = sparse_delta(*in_single_precision((tables, tokens)), chunk_size=8)
    np.testing.assert_array_equal(out.table, tables.astype(np.float32))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_sequence_may_be_cut_anywhere():
    tables, tokens = jax.tree.map(jnp.asarray, sample(6))
    whole = sparse_delta(tables, tokens, chunk_size=8)
    for cut in (1, 7, 8, 20):
        first, second = (
            jax.tree.map(lambda x, s=s: x[:, s], tokens) for s in (slice(cut), slice(cut, None))
        )
        early = sparse_delta(tables, first, chunk_size=8)
        late = sparse_delta(early.table, second, chunk_size=8)
        output = np.concatenate([early.output, late.output], axis=1)
        np.testing.assert_allclose(output, whole.output, rtol=0, atol=EXACT)
        np.testing.assert_allclose(late.table, whole.table, rtol=0, atol=EXACT)
