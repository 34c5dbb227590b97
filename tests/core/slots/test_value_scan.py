"""The value scan's own properties; that it equals the plain scan is tests/rules/test_two_phase."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.values import rows as row_functions
from fwpkm_jax.core.slots.values import scan as value_scan_module
from fwpkm_jax.core.slots.values.exchange import ChunkRows, RowOps
from fwpkm_jax.core.slots.values.grouping import group_slots
from fwpkm_jax.core.slots.values.scan import value_scan
from fwpkm_jax.core.slots.write import PLAIN
from tests.kernels.entry import programs

pytestmark = pytest.mark.usefixtures("float64")
SLOTS, VALUE, CHUNKS, TOKENS, PLACES = 9, 6, 3, 4, 2


def sample(slots=SLOTS, seed=0):
    rng = np.random.default_rng(seed)
    ids = jnp.asarray(rng.integers(slots, size=(CHUNKS, TOKENS, PLACES)), jnp.int32)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    rows = ChunkRows(
        weights=draw(CHUNKS, TOKENS, PLACES),
        steps=draw(CHUNKS, TOKENS, PLACES),
        targets=draw(CHUNKS, TOKENS, VALUE),
        error_weights=draw(CHUNKS, TOKENS),
    )
    return draw(slots, VALUE), ids, rows


@jax.jit
def scan(values, ids, rows):
    groups = jax.vmap(lambda x: group_slots(x, num_slots=values.shape[0]))(ids)
    return value_scan(values, ids, rows, groups, PLAIN, RowOps())


@pytest.mark.slow
def test_memories_of_equal_sizes_share_one_trace():
    values, ids, rows = sample()
    groups = jax.vmap(lambda x: group_slots(x, num_slots=SLOTS))(ids)

    def loss(targets):
        for _ in range(3):
            of_layer = rows._replace(targets=targets)
            targets = value_scan(values, ids, of_layer, groups, PLAIN, RowOps()).output
        return jnp.sum(targets)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(rows.targets).jaxpr
    for name in ("_scan_and_log", "_scan_back"):
        found = programs(jaxpr, name)
        assert len(found) == 3
        assert len(set(map(id, found))) == 1


def loops(values, ids, rows):
    """The same in NumPy, one place after the other."""
    values, (w, s, v, m) = np.array(values), jax.tree.map(np.asarray, rows)
    output, changes = np.zeros_like(v), []
    for c in range(CHUNKS):
        before = values.copy()
        for t in range(TOKENS):
            output[c, t] = sum(w[c, t, p] * before[ids[c, t, p]] for p in range(PLACES))
            for p in range(PLACES):
                values[ids[c, t, p]] += s[c, t, p] * m[c, t] * (output[c, t] - v[c, t])
        changes.append(np.sum((values - before) ** 2))
    return values, output, np.array(changes)


@pytest.mark.parametrize("slots", [1, SLOTS, 200])
def test_the_scan_is_the_loop_over_chunks_and_places(slots):
    inputs = sample(slots)
    out = scan(*inputs)
    values, output, change = loops(*inputs)
    chex.assert_trees_all_close(
        (out.values, out.output, out.squared_change.sum(-1)), (values, output, change), rtol=1e-12
    )


@pytest.mark.by_default("both-few_slots", thorough=["output-few_slots"])
@pytest.mark.parametrize("slots", [SLOTS, 200], ids=["few_slots", "many_slots"])
@pytest.mark.parametrize("through", ["output", "values", "both"])
def test_gradients_of_everything_are_the_automatic_ones(slots, through):
    values, ids, rows = sample(slots)
    draw = np.random.default_rng(7).normal
    along_output, along_values = draw(size=(CHUNKS, TOKENS, VALUE)), draw(size=values.shape)

    def loss(pass_over, values, rows):
        after, output = pass_over(values, ids, rows)
        loss = jnp.sum(along_output * output) if through != "values" else 0.0
        return loss + (jnp.sum(along_values * after) if through != "output" else 0.0)

    def plain(values, ids, rows):
        def chunk(values, inputs):
            ids, (w, s, v, m) = inputs
            output = jnp.einsum("tp,tpv->tv", w, values[ids])
            errors = m[:, None] * (output - v)
            return values.at[ids].add(s[..., None] * errors[:, None]), output

        return jax.lax.scan(chunk, values, (ids, rows))

    gradient = functools.partial(jax.grad, argnums=(1, 2))
    actual = gradient(loss)(lambda *a: scan(*a)[:2], values, rows)
    chex.assert_trees_all_close(actual, gradient(loss)(plain, values, rows), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_columns_never_meet():
    values, ids, rows = sample(200)

    def loss(values, rows):
        out = scan(values, ids, rows)
        return jnp.sum(jnp.sin(out.output)), out[:2]

    gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (values_bar, rows_bar), (after, output) = gradient(values, rows)
    parts = [
        gradient(values[:, half], rows._replace(targets=rows.targets[..., half]))
        for half in (slice(2), slice(2, None))
    ]
    join = lambda pick: jnp.concatenate([pick(*part) for part in parts], axis=-1)  # noqa: E731
    chex.assert_trees_all_close(join(lambda _, out: out[0]), after, rtol=1e-12)
    chex.assert_trees_all_close(join(lambda _, out: out[1]), output, rtol=1e-12)
    chex.assert_trees_all_close(join(lambda bar, _: bar[0]), values_bar, rtol=1e-12)
    chex.assert_trees_all_close(join(lambda bar, _: bar[1].targets), rows_bar.targets, rtol=1e-12)
    for name in ("weights", "steps", "error_weights"):
        summed = sum(getattr(bar[1], name) for bar, _ in parts)
        chex.assert_trees_all_close(summed, getattr(rows_bar, name), rtol=1e-10)


def test_the_measure_of_change_has_no_gradient():
    values, ids, rows = sample()
    bar = jax.grad(lambda rows: jnp.sum(scan(values, ids, rows).squared_change))(rows)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), bar)


@pytest.mark.parametrize("slots", [5, 40])
def test_where_later_rows_are_kept_is_the_same_by_one_sort_and_in_turn(slots):
    """One sort is what other devices than a CPU run."""
    rng = np.random.default_rng(slots)
    # Of each chunk five distinct numbers, some of them behind the table as unused groups have.
    touched = np.stack([rng.permutation(slots + 5)[:5] for _ in range(9)]).astype(np.int32)
    untouched = jnp.arange(1000, 1000 + slots, dtype=jnp.int32)
    expected = np.array(touched)
    for chunk, place in np.ndindex(*touched.shape):
        slot = touched[chunk, place]
        after = np.argwhere(touched[chunk + 1 :] == slot)
        first = 5 * (chunk + 1 + after[0][0]) + after[0][1] if len(after) else 1000 + slot
        expected[chunk, place] = first
    used = touched < slots
    for later in (value_scan_module._next_by_sort, value_scan_module._next_in_turn):
        actual = np.asarray(later(jnp.asarray(touched), untouched))
        np.testing.assert_array_equal(actual[used], expected[used])


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, SLOTS, 200])
def test_sums_over_sorted_runs_equal_additions_in_turn(slots):
    """What other devices than a CPU run, where two additions to one row would race."""
    values, ids, rows = sample(slots)
    groups = group_slots(ids[0], num_slots=slots)
    arguments = values, groups, rows.steps[0], rows.targets[0]
    chex.assert_trees_all_close(
        row_functions._add_by_runs(*arguments), row_functions.add_rows(*arguments), rtol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_blocks_of_tokens_equal_all_at_once(tokens):
    """A CPU takes 64 tokens' rows at a time; the last block may be shorter."""
    rng = np.random.default_rng(tokens)
    ids = jnp.asarray(rng.integers(SLOTS, size=(tokens, PLACES)), jnp.int32)
    values, vectors = (jnp.asarray(rng.normal(size=(n, VALUE))) for n in (SLOTS, tokens))
    steps = jnp.asarray(rng.normal(size=(tokens, PLACES)))
    groups = group_slots(ids, num_slots=SLOTS)
    sums = jnp.sum(values[ids] * steps[:, :, None], 1)
    dots = jnp.sum(values[ids] * vectors[:, None], -1)
    chex.assert_trees_all_close(row_functions.read_rows(values, ids, steps), sums, rtol=1e-12)
    chex.assert_trees_all_close(row_functions.dot_rows(values, ids, vectors), dots, rtol=1e-12)
    both = row_functions.read_and_dot_rows(values, ids, steps, vectors)
    chex.assert_trees_all_close(both, (sums, dots), rtol=1e-12)
    added = steps[:, :, None] * vectors[:, None]
    chex.assert_trees_all_close(
        row_functions.add_rows(values, groups, steps, vectors),
        values.at[ids].add(added),
        rtol=1e-12,
    )
