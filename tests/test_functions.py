"""The public functions are their definitions, gradients included, of documents apart and packed."""

import doctest
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax import FwPKM, functions
from fwpkm_jax.core.recurrence.gated_delta import recurrent_gated_delta_rule
from fwpkm_jax.core.slots.definition import read_and_write
from fwpkm_jax.core.slots.delta.definition import DeltaTokens, write_and_read
from fwpkm_jax.core.slots.keys.addressing import sub_key_scores
from fwpkm_jax.core.slots.write import SlotChunk
from fwpkm_jax.rules.matrix import MATRIX_RULES
from fwpkm_jax.testing.matrix_rules import sample_tokens

LENGTHS = {
    "small": (9,),
    "small_packed": (4, 1, 4),
    "large": (103,),
    "large_packed": (70, 33),
}
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "functions.md"
each_size = pytest.mark.parametrize("size", LENGTHS)
pytestmark = pytest.mark.usefixtures("float64")


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def segments(size):
    """Segment ids `[1, length]` of one row, or None where it is one document."""
    lengths = LENGTHS[size]
    if len(lengths) == 1:
        return None
    return jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths)[None], jnp.int32)


def apart(function, size, *arrays):
    """The outputs of each document alone, one after the other."""
    ends = np.cumsum(LENGTHS[size])
    parts = [
        function(*(x[:, end - length : end] for x in arrays))
        for end, length in zip(ends, LENGTHS[size], strict=True)
    ]
    return jnp.concatenate(parts, axis=1)


def assert_equal_with_gradients(function, definition, *arrays, atol=1e-10):
    """Values, and the gradients of a weighted sum of them by all arrays."""
    weights = drawn(*jax.eval_shape(definition, *arrays).shape, seed=9)

    def found(f):
        value, pull = jax.vjp(f, *arrays)
        return value, pull(weights)

    expected, actual = (jax.jit(found, static_argnums=0)(f) for f in (definition, function))
    assert all(np.any(x != 0) for x in expected[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), actual, expected)


def gated_tokens(length, *, batch=1, heads=2, key=3, value=4):
    """q, k, v, g and beta of a gated delta rule."""
    shape = (batch, length, heads)
    q, k = (drawn(*shape, key, seed=seed) for seed in range(2))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    v = drawn(*shape, value, seed=2)
    return q, k, v, -jnp.abs(drawn(*shape, seed=3)), jax.nn.sigmoid(drawn(*shape, seed=4))


@pytest.mark.thorough("large_packed")
@each_size
def test_the_gated_delta_rule_writes_and_reads_token_by_token(size):
    def definition(q, k, v, g, beta):
        return recurrent_gated_delta_rule(q, k, v, log_decay=g, beta=beta).output

    def function(*arrays):
        return functions.gated_delta_rule(*arrays, segment_ids=segments(size)).output

    arrays = gated_tokens(sum(LENGTHS[size]))
    assert_equal_with_gradients(
        function, lambda *x: apart(definition, size, *x), *arrays, atol=1e-9
    )


@pytest.mark.thorough
def test_a_state_carries_a_memory_from_call_to_call():
    q, k, v, g, beta = arrays = gated_tokens(9, batch=2)
    first, rest = ([x[:, part] for x in arrays] for part in (slice(3), slice(3, None)))
    whole = functions.gated_delta_rule(*arrays)
    before = functions.gated_delta_rule(*first).final_state
    # Whatever the id of the first document: it goes on.
    for ids in (None, jnp.full((2, 6), 7)):
        how = {"initial_state": before, "segment_ids": ids}
        after = functions.gated_delta_rule(*rest, **how)
        named = functions.matrix_memory(
            "gated_deltanet", rest[0] * 3**-0.5, *rest[1:3], g=rest[3], beta=rest[4], **how
        )
        for out in (after, named):
            np.testing.assert_allclose(out.final_state, whole.final_state, rtol=0, atol=1e-12)
            np.testing.assert_allclose(out.output, whole.output[:, 3:], rtol=0, atol=1e-12)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2, 2]] * 2)
    alone = functions.gated_delta_rule(*rest)
    packed = functions.gated_delta_rule(q, k, v, g, beta, initial_state=before, segment_ids=ids)
    np.testing.assert_allclose(packed.final_state, alone.final_state, rtol=0, atol=1e-12)


MEMORIES = ("gla", "kda", "deltanet", "deltaproduct", "rwkv7", "mlstm")
"""With a decay by channel and a strength; without the one or the other; several writes per token;
a strength by channel; a state of several arrays."""


@pytest.mark.thorough("gla-large_packed", "kda-small_packed")
@each_size
@pytest.mark.parametrize("name", MEMORIES)
def test_a_matrix_memory_is_its_rule(name, size):
    rule = MATRIX_RULES[name]()
    tokens = sample_tokens(rule, batch=1, length=sum(LENGTHS[size]), heads=2, key=3, value=4)
    tokens = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tokens)
    present = [name for name, x in tokens._asdict().items() if x is not None]

    def definition(*arrays):
        ids, given = segments(size), tokens._replace(**dict(zip(present, arrays, strict=True)))
        if ids is None:
            return rule.recurrent(given).output
        bounds = np.cumsum((0, *LENGTHS[size]))
        parts = []
        for start, end in itertools.pairwise(bounds):
            steps = {"key": rule.steps, "value": rule.steps, "strength": rule.steps}
            of_document = {
                field: None if x is None else x[:, start * (n := steps.get(field, 1)) : end * n]
                for field, x in given._asdict().items()
            }
            parts.append(rule.recurrent(type(given)(**of_document)).output)
        return jnp.concatenate(parts, axis=1)

    def function(*arrays):
        given = tokens._replace(**dict(zip(present, arrays, strict=True)))
        gates = {"g": given.log_decay, "beta": given.strength, "segment_ids": segments(size)}
        return functions.matrix_memory(rule, *given[:3], **gates).output

    arrays = [x for x in tokens if x is not None]
    assert_equal_with_gradients(function, definition, *arrays, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("ids", [[1, 1, 1, 1, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 2, 2]])
@pytest.mark.parametrize("with_state", [False, True])
def test_padding_changes_no_memory(ids, with_state):
    ids = jnp.asarray([ids])
    real = np.flatnonzero(np.asarray(ids[0]))
    arrays = gated_tokens(8)
    state = drawn(1, 2, 3, 4, seed=6) if with_state else None
    padded = functions.gated_delta_rule(*arrays, segment_ids=ids, initial_state=state)
    kept = [x[:, real] for x in arrays]
    alone = functions.gated_delta_rule(*kept, segment_ids=ids[:, real], initial_state=state)
    np.testing.assert_allclose(padded.final_state, alone.final_state, rtol=0, atol=1e-12)
    np.testing.assert_allclose(padded.output[:, real], alone.output, rtol=0, atol=1e-12)
    q, k, v, _, beta = arrays
    memory = functions.matrix_memory("deltanet", q, k, v, beta=beta, segment_ids=ids)
    kept = functions.matrix_memory(
        "deltanet", *(x[:, real] for x in (q, k, v)), beta=beta[:, real], segment_ids=ids[:, real]
    )
    np.testing.assert_allclose(memory.final_state, kept.final_state, rtol=0, atol=1e-12)


@pytest.mark.thorough("dot-4-2")
@pytest.mark.parametrize(("subkeys", "top_k"), [(4, 2), (9, 5)])
@pytest.mark.parametrize("score", ["dot", "idw"])
def test_a_lookup_is_the_softmax_of_the_best_of_all_slots(subkeys, top_k, score):
    q, keys = drawn(2, 3, 2, 6), drawn(2, 2, subkeys, 3, seed=1)
    values = drawn(subkeys**2, 5, seed=2)

    def definition(q, keys, values):
        scores = sub_key_scores(q.reshape(-1, 2, 6), keys, score=score)
        slots = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).reshape(6, 2, -1)
        best, ids = jax.lax.top_k(slots, top_k)
        read = jnp.einsum("thp,thpv->tv", jax.nn.softmax(best), values[ids])
        return read.reshape(2, 3, -1)

    def function(*arrays):
        return functions.product_key_lookup(*arrays, top_k=top_k, score=score).output

    assert_equal_with_gradients(function, definition, q, keys, values)
    found = functions.product_key_lookup(q, keys, values, top_k=top_k, score=score)
    read = jnp.einsum("blhp,blhpv->blv", found.slot_weights, values[found.slot_ids])
    np.testing.assert_allclose(found.output, read, rtol=0, atol=1e-12)


@pytest.mark.slow
@each_size
def test_fwpkm_is_its_definition_chunk_by_chunk(size):
    rule = FwPKM(num_subkeys=5, key_dim=6, value_dim=4, num_heads=2, top_k=3)
    length, chunk = sum(LENGTHS[size]), 40 if "large" in size else 4
    memory = jax.tree.map(lambda x: x.astype(jnp.float64), rule.init(jax.random.key(0)))
    queries, targets = drawn(1, length, 2, 6), drawn(1, length, 4, seed=1)
    gate = jax.nn.sigmoid(drawn(1, length, seed=2))

    def definition(keys, values, queries, targets, gate):
        reads = []
        for start in range(0, length, chunk):
            part = (x[0, start : start + chunk] for x in (queries, targets, gate))
            query, target, weight = part
            ones = jnp.ones_like(weight)
            tokens = SlotChunk(query, target, weight, ones, ones, ones)
            keys, values, read = read_and_write(keys, values, tokens, top_k=3)
            reads.append(read)
        # The keys differ in size; their sum stands for them.
        return jnp.concatenate([*reads, values, jnp.sum(keys**2).reshape(1, 1).repeat(4, 1)])

    def function(keys, values, queries, targets, gate):
        how = {"chunk_size": chunk, "top_k": 3, "segment_ids": segments(size)}
        out = functions.fwpkm(keys, values, queries, targets, write_weight=gate, **how)
        keys = jnp.sum(out.keys**2).reshape(1, 1).repeat(4, 1)
        return jnp.concatenate([out.output[0], out.values, keys])

    arrays = (memory.keys, memory.values, queries, targets, gate)
    assert_equal_with_gradients(function, definition, *arrays)


@pytest.mark.thorough
def test_fwpkm_pairs_no_tokens_of_different_documents():
    memory = FwPKM(num_subkeys=5, key_dim=6, value_dim=4, top_k=2).init(jax.random.key(0))
    queries, values = drawn(1, 8, 1, 6), drawn(1, 8, 4, seed=1)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 0, 0]])

    @jax.jit
    def written(values):
        how = {"chunk_size": 8, "top_k": 2, "lookahead": 1, "segment_ids": ids}
        return functions.fwpkm(memory.keys, memory.values, queries, values, **how).values

    before = written(values)
    for token, changes in ((3, False), (0, False), (6, False), (7, False), (2, True), (5, True)):
        moved = written(values.at[0, token].add(1.0))
        assert np.array_equal(moved, before) is not changes, token


@pytest.mark.thorough("40-64")
@pytest.mark.parametrize(("tokens", "block"), [(5, 2), (40, 64)])
def test_the_cross_entropy_is_the_mean_over_the_labels_that_count(tokens, block):
    x, head, bias = drawn(tokens, 3), drawn(3, 7, seed=1), drawn(7, seed=2)
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 7, tokens)).at[1].set(-100)
    weights = jnp.abs(drawn(tokens, seed=4)).at[2].set(0.5)

    def definition(x, head, bias, weights):
        losses = -jax.nn.log_softmax(x @ head + bias[None])[jnp.arange(tokens), labels]
        known = jnp.where(labels < 0, 0.0, weights)
        return (jnp.sum(known * losses) / jnp.sum(known))[None]

    def function(x, head, bias, weights):
        how = {"bias": bias, "weights": weights, "block": block}
        return functions.linear_cross_entropy(x, head, labels, **how)[None]

    assert_equal_with_gradients(function, definition, x, head, bias, weights)
    # A batch of sequences has the loss of its tokens.
    of_batch = functions.linear_cross_entropy(
        x.reshape(5, -1, 3), head, labels.reshape(5, -1), bias=bias, block=block
    )
    np.testing.assert_allclose(
        of_batch, functions.linear_cross_entropy(x, head, labels, bias=bias), rtol=1e-12
    )


@pytest.mark.thorough
def test_a_label_outside_of_the_vocabulary_is_no_silent_one():
    x, head = drawn(3, 2), drawn(2, 7, seed=1)
    loss = jax.value_and_grad(functions.linear_cross_entropy)
    for labels, finite in (([0, 6, -100], True), ([0, 7, 1], False)):
        assert all(np.isfinite(y).all() == finite for y in loss(x, head, jnp.asarray(labels)))
    none, slope = loss(x, head, jnp.full(3, -1))
    assert none == 0
    assert not slope.any()


def summed(x, weight):
    """A short convolution by its definition, one document in each row."""
    width, length = weight.shape[0], x.shape[1]
    taps = (
        weight[j][None, None] * jnp.pad(x, [(0, 0), (width - 1 - j, 0), (0, 0)])[:, :length]
        for j in range(width)
    )
    return sum(taps)


@each_size
@pytest.mark.parametrize(("activation", "function"), [("silu", jax.nn.silu), (None, lambda y: y)])
def test_a_short_convolution_sums_each_channels_last_inputs(size, activation, function):
    x, weight = drawn(1, sum(LENGTHS[size]), 3), drawn(4, 3, seed=1)

    def convolved(x, weight):
        how = {"segment_ids": segments(size), "activation": activation}
        return functions.short_convolution(x, weight, **how).output

    assert_equal_with_gradients(
        convolved,
        lambda x, weight: apart(lambda x: function(summed(x, weight)), size, x),
        x,
        weight,
    )


@pytest.mark.slow
def test_a_convolutions_state_holds_the_inputs_of_its_last_document():
    x, weight = drawn(2, 9, 3), drawn(4, 3, seed=1)
    whole = functions.short_convolution(x, weight)
    np.testing.assert_array_equal(whole.final_state, x[:, -3:])
    for cut in (2, 5):
        first, state = functions.short_convolution(x[:, :cut], weight)
        ids = jnp.ones((2, 9 - cut), jnp.int32)
        rest = functions.short_convolution(x[:, cut:], weight, initial_state=state, segment_ids=ids)
        np.testing.assert_allclose(
            jnp.concatenate([first, rest.output], axis=1), whole.output, rtol=0, atol=1e-12
        )
        np.testing.assert_array_equal(rest.final_state, whole.final_state)
    packed = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 2]])
    end = functions.short_convolution(x, weight, segment_ids=packed).final_state
    np.testing.assert_array_equal(end[0], jnp.pad(x[0, 5:7], ((1, 0), (0, 0))))
    np.testing.assert_array_equal(end[1], jnp.pad(x[1, 8:], ((2, 0), (0, 0))))


@pytest.mark.slow
def test_the_page_shows_what_its_examples_give():
    tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried.failed == 0 < tried.attempted


@pytest.mark.usefixtures("without_type_checks")
def test_what_does_not_fit_is_named():
    keys, values = drawn(1, 2, 4, 3), drawn(16, 5)
    q, k, v, g, beta = gated_tokens(4, heads=1)
    for call, message in (
        (
            lambda: functions.product_key_lookup(drawn(2, 6), keys, values, top_k=2),
            r"q is float64\[2, 6\]; expected \[..., heads=1, key=6\]; add the axis of heads, as q",
        ),
        (
            lambda: functions.product_key_lookup(drawn(2, 1, 6), keys, values[:15], top_k=2),
            "values has 15 rows; 4 sub-keys per codebook make 16 slots",
        ),
        (
            lambda: functions.fwpkm(keys, values, drawn(1, 4, 6), drawn(1, 4, 5)),
            r"queries is .*: the number of axes is 3; add one, as queries\[:, :, None\]",
        ),
        (
            lambda: functions.gated_delta_rule(q[:, :, 0], k, v, g, beta),
            r"q is .*; add one, as q\[None\] for batch or q\[:, :, None\] for heads",
        ),
        (
            lambda: functions.gated_delta_rule(q, k[:, :, 0], v, g, beta),
            r"k is .*; add one, as k\[:, :, None\]",
        ),
        (
            lambda: functions.gated_delta_rule(q, k, v, g[:, :, 0], beta),
            r"g is .*; add one, as g\[:, :, None\]",
        ),
        (
            lambda: functions.matrix_memory("kba", q, k, v),
            "rule='kba' is no matrix memory; the nearest name is",
        ),
        (
            lambda: functions.matrix_memory("kda", q, k, v, beta=beta),
            r"KDA needs g, an array \[batch, length, heads, key\]",
        ),
        (
            lambda: functions.matrix_memory("kda", q, k, v, g=g, beta=beta),
            r"g is float64\[1, 4, 1\]; expected \[batch=1, length=4, heads=1, key=3\]",
        ),
        (
            lambda: functions.matrix_memory("gla", q, k, v, g=q, beta=beta),
            "GLA has no beta; leave beta=float64",
        ),
        (
            lambda: functions.matrix_memory("deltaproduct", q, k, v, g=g, beta=beta),
            "k is .*writes=8",
        ),
        (
            lambda: functions.linear_cross_entropy(drawn(4, 2), drawn(2, 7), jnp.zeros(3, int)),
            r"labels \[3\]: expected \[4\]",
        ),
        (
            lambda: functions.short_convolution(drawn(1, 4, 3), drawn(3, 4)),
            r"weight is float64\[3, 4\]; expected \[width, channels=3\]",
        ),
        (
            lambda: functions.short_convolution(drawn(1, 4, 3), drawn(4, 3), activation="relu"),
            "activation='relu' is neither 'silu' nor None",
        ),
        (
            lambda: functions.short_convolution(
                drawn(1, 4, 3), drawn(4, 3), initial_state=drawn(1, 4, 3)
            ),
            r"initial_state is .*; expected \[batch=1, reach=3, channels=3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def sparse_tokens(length, *, slots=7, writes=3, reads=2, value=4):
    """Tables and tokens of two rows, after names of `functions.sparse_delta`."""
    ids = np.random.default_rng(8).integers(0, slots, (2, length, writes + reads))
    weights = jax.nn.softmax(drawn(2, length, writes + reads, seed=5), axis=-1)
    return {
        "table": drawn(2, slots, value, seed=6),
        "write_ids": jnp.asarray(ids[..., :writes]),
        "write_weights": weights[..., :writes],
        "read_ids": jnp.asarray(ids[..., writes:]),
        "read_weights": weights[..., writes:],
        "v": drawn(2, length, value, seed=2),
        "g": -jnp.abs(drawn(2, length, seed=3)),
        "beta": jax.nn.sigmoid(drawn(2, length, seed=4)),
    }


@pytest.mark.slow
def test_sparse_delta_writes_and_reads_its_slots_and_starts_documents_from_zeros():
    given = sparse_tokens(9)
    table = given.pop("table")
    alone = jax.vmap(lambda table, given: write_and_read(table, DeltaTokens(*given)))
    expected = alone(table, tuple(given.values()))
    out = functions.sparse_delta(table, **given)
    np.testing.assert_allclose(out.output, expected.output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(out.table, expected.table, rtol=0, atol=1e-12)

    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0]] * 2)
    packed = functions.sparse_delta(table, **given, segment_ids=ids)
    for part, start in ((slice(3), table), (slice(3, 7), 0 * table)):
        piece = alone(start, tuple(x[:, part] for x in given.values()))
        np.testing.assert_allclose(packed.output[:, part], piece.output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(packed.table, piece.table, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_id_outside_the_table_spoils_its_own_row_alone():
    given = sparse_tokens(4)
    given["write_ids"] = given["write_ids"].at[0, 1, 0].set(7)
    out = functions.sparse_delta(**given)
    assert np.isnan(out.table[0]).any()
    assert np.isfinite(out.table[1]).all()
