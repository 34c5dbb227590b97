"""The memory block: its formulas, gate, padding, groups, losses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.memories.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import FwMLP
from tests.layers.memory_block import (
    BATCH,
    CHUNK,
    CONFIG,
    LENGTH,
    assert_close,
    assert_equal,
    layer_of,
    params_of,
    sample,
    start,
    whole,
)

pytestmark = pytest.mark.usefixtures("float64")


def with_gate(params, bias):
    """The parameters with a gate of sigmoid(bias), whatever comes in."""
    params = jax.tree.map(lambda x: x, params)
    params.gate_proj.kernel[...] = jnp.zeros_like(params.gate_proj.kernel[...])
    params.gate_proj.bias[...] = jnp.full_like(params.gate_proj.bias[...], bias)
    return params


def plain_norm(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * (1 + weight)


def plain_linear(x, linear):
    return x @ np.asarray(linear.kernel[...]) + np.asarray(linear.bias[...])


@pytest.mark.by_default("standardize-False", thorough=["none-True"])
@pytest.mark.parametrize(
    ("query_norm", "gate_output"), [("none", True), ("standardize", False), ("l2", True)]
)
def test_the_block_follows_its_formulas(query_norm, gate_output):
    config = dataclasses.replace(CONFIG, query_norm=query_norm, gate_output=gate_output)
    params, memory, x = params_of(config), start(config=config), sample()
    layer = layer_of(params, config)
    normed = {
        name: plain_norm(np.asarray(x), np.asarray(getattr(layer, f"{name}_norm").weight[...]))
        for name in ("query", "value", "gate")
    }
    query = plain_linear(normed["query"], layer.query_proj).reshape(BATCH, LENGTH, 2, -1)
    if query_norm == "standardize":
        centred = query - query.mean(-1, keepdims=True)
        query = centred / (np.std(query, axis=-1, ddof=1, keepdims=True) + 1e-6)
    elif query_norm == "l2":
        query = query / np.sqrt(np.sum(query**2, axis=-1, keepdims=True) + 1e-6)
    query = query.reshape(BATCH, LENGTH, 2, 6)
    value = plain_linear(normed["value"], layer.value_proj)
    value = (value - value.mean(-1, keepdims=True)) / (
        np.std(value, axis=-1, ddof=1, keepdims=True) + 1e-6
    )
    gate = 1 / (1 + np.exp(-plain_linear(normed["gate"], layer.gate_proj).mean(-1)))

    sequence = config.rule.sequence(
        *map(jnp.asarray, (query, value)), gate=jnp.asarray(gate), chunk_size=CHUNK
    )
    expected = jax.jit(lambda m, s: config.rule.run(m, s, chunk_size=CHUNK))(
        jax.tree.map(lambda x: x[0], memory), sequence
    )
    read = np.asarray(expected.output)
    mixed = gate[..., None] * read + (1 - gate[..., None]) * value if gate_output else read + value
    mixed = plain_norm(mixed, np.asarray(layer.out_norm.weight[...]))
    y, after, info = whole(params, x, memory, config=config)
    assert_close(y, plain_linear(mixed, layer.out_proj))
    assert_close(jax.tree.map(lambda x: x[0], after), expected.memory)
    assert_close(info.gate, gate)
    np.testing.assert_array_equal(info.access.slot_ids, expected.access.slot_ids)


@pytest.mark.slow
def test_a_closed_gate_hides_the_memory_and_writes_no_value():
    params, memory, x = with_gate(params_of(), -1e4), start(), sample()
    other = jax.tree.map(lambda x: x + 1, memory)
    one, two = (whole(params, x, m) for m in (memory, other))
    assert_equal(one[0], two[0])
    assert_equal(one[1].values, memory.values)
    opened = with_gate(params_of(), 0.0)
    assert np.any(whole(opened, x, memory)[0] != whole(opened, x, other)[0])


@pytest.mark.slow
def test_with_a_gated_residual_a_closed_gate_adds_nothing():
    config = dataclasses.replace(CONFIG, gate_residual=True)
    params, memory, x = params_of(config), start(), sample()
    plain, written, info = whole(params, x, memory)
    gated, same, _ = whole(params, x, memory, config=config)
    assert_close(gated, info.gate[..., None] * plain)
    assert_close(same, written)
    closed = whole(with_gate(params_of(config), -1e4), x, memory, config=config)
    assert_equal(closed[0], jnp.zeros_like(x))
    assert FastWeightConfig(gate_output=False, weight_by_gate=False, gate_residual=True).has_gate


def test_with_a_full_read_an_empty_memory_adds_nothing():
    config = dataclasses.replace(CONFIG, full_read=0.3)
    params, memory, x = params_of(config), start(), sample()
    plain, written, _ = whole(params, x, memory)
    scaled, same, _ = whole(params, x, memory, config=config)
    assert_close(same, written)
    # Where the read is 0.3 or more in size, nothing changes; below, less is added.
    share = np.linalg.norm(scaled, axis=-1) / np.linalg.norm(plain, axis=-1)
    assert share.max() == pytest.approx(1, abs=1e-9)
    assert (share < 0.9).any()
    assert_close(scaled, share[..., None] * plain)
    empty = memory._replace(values=jnp.zeros_like(memory.values))
    none, *_ = whole(params, x, empty, config=config, write=False)
    assert_equal(none, jnp.zeros_like(x))
    with pytest.raises(ValueError, match=r"full_read=-1.* must be above 0"):
        dataclasses.replace(CONFIG, full_read=-1.0)


@pytest.mark.slow
def test_the_gate_starts_where_its_bias_puts_it_and_no_other_weight_changes():
    layer, opened = (
        FastWeight(dataclasses.replace(CONFIG, gate_bias=bias), 10, rngs=nnx.Rngs(0))
        for bias in (0.0, 2.0)
    )
    nothing = jnp.zeros((1, 3, 10))
    assert_close(opened.signals(nothing, None).gate, 1 / (1 + np.exp(-2)))
    before, after = (
        {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(one))}
        for one in (layer, opened)
    )
    differ = {name for name in before if np.any(before[name] != after[name])}
    assert differ == {"gate_proj/bias"}


@pytest.mark.slow
def test_an_unweighted_loss_writes_behind_a_closed_gate():
    config = dataclasses.replace(CONFIG, weight_by_gate=False)
    params, memory, x = with_gate(params_of(config), -1e4), start(config=config), sample()
    first = whole(params, x, memory, config=config)[1]
    assert np.any(first.values != memory.values)
    opened = whole(with_gate(params_of(config), 2.0), x, memory, config=config)[1]
    assert_close(opened, first)


@pytest.mark.slow
@given(
    mask=st.lists(st.booleans(), min_size=BATCH * LENGTH, max_size=BATCH * LENGTH),
    groups=st.sampled_from([1, BATCH]),
)
def test_what_stands_at_padding_changes_no_token_and_no_memory(mask, groups):
    mask = np.array(mask, np.float64).reshape(BATCH, LENGTH)
    params, memory, x = params_of(), start(groups=groups), sample()
    other = jnp.where(mask[..., None] == 1, x, sample(seed=1))
    one, two = (whole(params, x, memory, jnp.asarray(mask)) for x in (x, other))
    assert_equal(np.asarray(one[0])[mask == 1], np.asarray(two[0])[mask == 1])
    assert_equal(one[1], two[1])
    if not np.any(mask):
        assert_equal(one[1], memory)


@pytest.mark.slow
@settings(max_examples=8)
@given(lengths=st.lists(st.sampled_from([2, 5, 8]), min_size=BATCH, max_size=BATCH))
def test_padding_behind_is_as_good_as_none(lengths):
    """Each sequence, with a memory of its own, gives what it gives alone and unpadded."""
    params, memory, x = params_of(), start(groups=BATCH), sample()
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.float64)
    y, after, _ = whole(params, x, memory, jnp.asarray(mask))
    for row, length in enumerate(lengths):
        alone, memory_alone, _ = whole(params, x[row : row + 1, :length], start())
        assert_close(y[row : row + 1, :length], alone)
        assert_close(jax.tree.map(lambda x, row=row: x[row : row + 1], after), memory_alone)


@pytest.mark.slow
def test_groups_are_independent_and_a_shared_memory_is_not():
    params, x = params_of(), sample()
    changed = x.at[1].multiply(-1)
    memory = start(groups=BATCH)
    one, two = (whole(params, x, memory) for x in (x, changed))
    assert_equal(one[0][0], two[0][0])
    assert_equal(*(jax.tree.map(lambda x: x[0], out[1]) for out in (one, two)))
    shared = start()
    one, two = (whole(params, x, shared) for x in (x, changed))
    assert np.any(one[0][0] != two[0][0])


def test_groups_must_divide_the_batch_and_exist():
    with pytest.raises(ValueError, match="2 sequences does not divide into 3 memory groups"):
        whole(params_of(), sample(), start(groups=3))
    with pytest.raises(ValueError, match="groups=0 must be at least 1"):
        start(groups=0)


@pytest.mark.thorough
def test_later_tokens_and_targets_change_no_earlier_output():
    params, memory, x = params_of(), start(), sample()
    y = whole(params, x, memory)[0]
    for position in range(1, LENGTH):
        changed = whole(params, x.at[:, position:].multiply(-1), memory)[0]
        assert_equal(changed[:, :position], y[:, :position])


@pytest.mark.slow
def test_the_memory_loss_is_the_mean_over_the_pairs():
    mask = jnp.ones((BATCH, LENGTH)).at[1, 4:].set(0)
    info = whole(params_of(), sample(), start(), mask)[2]
    real_pair = np.asarray(mask) * np.pad(np.asarray(mask)[:, 1:], [(0, 0), (0, 1)])
    real_pair[:, CHUNK - 1 :: CHUNK] = 0
    assert np.all((np.asarray(info.token_loss) != 0) == (real_pair == 1))
    in_chunk = np.ones(LENGTH)
    in_chunk[CHUNK - 1 :: CHUNK] = in_chunk[-1] = 0
    np.testing.assert_allclose(
        info.memory_loss, np.sum(info.token_loss) / (BATCH * in_chunk.sum()), rtol=1e-12
    )


def test_no_gradient_flows_through_what_is_reported():
    """Losses and measures are for logs: adding them to a loss changes nothing that is learned."""

    def reported(params, x):
        info = whole(params, x, start())[2]
        info = info._replace(query=jnp.zeros(()))  # By it addresses are trained.
        numbers = [
            leaf for leaf in jax.tree.leaves(info) if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        return sum(jnp.sum(leaf) for leaf in numbers)

    gradients = jax.jit(jax.grad(reported, argnums=(0, 1)))(params_of(), sample())
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradients))


def test_a_chunk_without_room_for_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"chunk_size=1 must exceed rule\.lookahead=1"):
        dataclasses.replace(CONFIG, chunk_size=1)


def test_a_gate_that_has_no_finite_start_is_refused():
    with pytest.raises(ValueError, match=r"gate_bias=nan must be finite; 0 is a gate of a half"):
        dataclasses.replace(CONFIG, gate_bias=math.nan)


@pytest.mark.thorough
def test_a_dense_memory_takes_the_place_of_the_slots():
    """The block around FwMLP: its answer, no slots, the mean targets in both losses, a stream."""
    rule = FwMLP(key_dim=6, value_dim=5, hidden_dim=4, target="mean", learning_rate=0.5)
    config = FastWeightConfig(rule=rule, chunk_size=CHUNK, weight_by_gate=False)
    params, x = params_of(config), sample()
    layer, memory = layer_of(params, config), start(config=config)
    signals = layer.signals(x, None)
    sequence = rule.sequence(signals.query, signals.value, chunk_size=CHUNK)
    run = jax.jit(lambda m, s: rule.run(m, s, chunk_size=CHUNK))
    expected = run(jax.tree.map(lambda leaf: leaf[0], memory), sequence)
    out, after, info = whole(params, x, memory, config=config)
    assert_close(out, layer.merge(expected.output, signals, dtype=x.dtype))
    assert_close(jax.tree.map(lambda leaf: leaf[0], after), expected.memory)
    assert info.access is info.measures is None
    assert info.write._fields == ("update_norm",)
    assert info.write.update_norm > 0
    errors = np.mean((expected.output - sequence.target) ** 2, axis=-1)
    assert_close(info.token_loss, errors * sequence.paired)

    @functools.partial(jax.jit, static_argnames="write")
    def stream(x, memory, pending, write):
        return layer_of(params, config).stream(x, memory, pending, write=write)

    pending = layer.init_pending(BATCH, 1, max_chunk_size=CHUNK, dtype=x.dtype)
    frozen, same, _, facts = stream(x, memory, pending, False)
    assert_equal(same, memory)
    values = signals.value
    reads = jax.vmap(rule.read)(memory, signals.query.reshape(1, -1, 1, 6))[0]
    reads = reads.reshape(values.shape)
    assert_close(frozen, layer.merge(reads, signals, dtype=x.dtype))
    errors = (reads[:, :-1] - (values[:, :-1] + values[:, 1:]) / 2) ** 2
    assert_close(facts.token_loss[:, :-1], np.mean(errors, axis=-1))
    assert_equal(facts.token_loss[:, -1], jnp.zeros(BATCH))
    written = stream(x, memory, pending, True)[1]
    assert all(np.any(a != b) for a, b in zip(written, memory, strict=True))


def test_a_layer_without_a_use_for_the_gate_has_no_projection():
    arrays = {}
    for used in (True, False):
        config = FastWeightConfig(weight_by_gate=used, gate_output=False)
        assert config.has_gate == used
        layer = nnx.eval_shape(lambda config=config: FastWeight(config, 8, rngs=nnx.Rngs(0)))
        arrays[used] = {path[0] for path, _ in nnx.to_flat_state(nnx.state(layer))}
    assert arrays[True] - arrays[False] == {"gate_norm", "gate_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fwpkm", "fwmlp"])
def test_each_document_starts_from_the_memory_that_comes_in(name):
    """Reads, gradients and memories as of each document alone, wherever it lies in the row."""
    rule = {} if name == "fwpkm" else {"rule": FwMLP(key_dim=4, value_dim=5, hidden_dim=4)}
    config = dataclasses.replace(CONFIG, documents="document", **rule)
    length, lengths = 10, [[1, 5, 4], [3, 7]]  # Units of 3: a token, a unit, more, all with rests.
    params, memory, x = params_of(config), start(groups=2, config=config), sample(length)
    starts, rows = np.zeros((2, length), bool), np.zeros((5, length), int)
    mask, own = np.zeros((5, length)), 0
    for row in range(2):
        for number, size in enumerate(lengths[row]):
            first = sum(lengths[row][:number])
            starts[row, first] = True
            rows[own, :size], mask[own, :size] = row * length + np.arange(first, first + size), 1
            own += 1
    cotangent = np.random.default_rng(3).normal(size=(2, length, x.shape[2]))

    @jax.jit
    def of(params, x, memory, c, **options):
        def loss(params, x):
            out, after, facts = layer_of(params, config)(x, memory, **options)
            return jnp.sum(out * c), (out, after, facts.token_loss)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    def apart(a):
        return jnp.asarray(np.asarray(a).reshape(2 * length, -1)[rows] * mask[..., None])

    (d_params, d_x), ours = of(params, x, memory, cotangent, starts=jnp.asarray(starts))
    separate = jax.tree.map(lambda m: jnp.repeat(m[:1], 5, axis=0), memory)
    (d_params_2, d_x_2), other = of(
        params, apart(x), separate, apart(cotangent), mask=jnp.asarray(mask)
    )
    assert_close(d_params, d_params_2)
    for mine, theirs in ((ours[0], other[0]), (ours[2], other[2]), (d_x, d_x_2)):
        mine = np.asarray(mine).reshape(2 * length, -1)
        for row in range(5):
            at = mask[row] != 0
            expected = np.asarray(theirs[row]).reshape(length, -1)[at]
            np.testing.assert_allclose(mine[rows[row, at]], expected, rtol=1e-9, atol=1e-12)
    assert_close(ours[1], jax.tree.map(lambda m: m[np.array([2, 4])], other[1]))
    assert np.any(np.asarray(jax.tree.leaves(ours[1])[-1]) != jax.tree.leaves(memory)[-1])


@pytest.mark.thorough("fwpkm-chunks")
@pytest.mark.parametrize("way", ["chunks", "flush", "frozen"])
@pytest.mark.parametrize("name", ["fwpkm", "fwmlp"])
def test_each_document_of_a_stream_starts_from_the_initial_memory(name, way):
    """Reads, memory and queue as of each document in a stream of its own, however it is cut."""
    rule = {} if name == "fwpkm" else {"rule": FwMLP(key_dim=4, value_dim=5, hidden_dim=4)}
    config = dataclasses.replace(CONFIG, documents="document", **rule)
    params, initial, length = params_of(config), start(groups=2, config=config), 24
    x, width = np.asarray(sample(length)), 8
    # One token, several chunks of 3, ends of chunks; documents that go on in later pieces.
    first = [[0, 1, 5, 14, 21], [0, 9, 10, 11, 17]]
    starts = np.zeros((2, length), bool)
    for row in range(2):
        starts[row, first[row]] = True

    @jax.jit
    def piece(params, x, memory, pending, mask, numbers, starts):
        options = {"chunk_size": "flush" if way == "flush" else CHUNK, "write": way != "frozen"}
        options |= {"mask": mask, "numbers": numbers, "starts": starts, "initial": initial}
        out = layer_of(params, config).stream(x, memory, pending, **options)
        return out[0], out[1], out[2], out[3].token_loss

    def stream(x, starts, real):
        """Outputs, losses, memory and queue; padding stands within the pieces."""
        layer = layer_of(params, config)
        memory = jax.tree.map(lambda m: m + 0.1, initial)  # Of a document before.
        pending = layer.init_pending(2, 2, max_chunk_size=length, dtype=jnp.float64)
        numbers, outputs = np.cumsum(starts, axis=1, dtype=np.int32), []
        for begin in range(0, length, width):
            at = slice(begin, begin + width)
            arrays = (x[:, at], memory, pending, 1.0 * real[:, at], numbers[:, at], starts[:, at])
            y, memory, pending, losses = piece(params, *arrays)
            outputs.append((np.asarray(y), np.asarray(losses)))
        joined = (np.concatenate(part, axis=1) for part in zip(*outputs, strict=True))
        return *joined, memory, pending

    real = np.random.default_rng(4).uniform(size=starts.shape) < 0.8
    output, losses, memory, pending = stream(x, starts, real)
    # With resets off: of the documents, or if nothing is written, from the one before the row.
    leaky, *_ = stream(x, starts & (np.arange(length) == 0) & (way == "chunks"), real)
    ends = [[*row[1:], length] for row in first]
    for number in range(5):
        own, begun, moved = np.zeros_like(x), np.zeros_like(starts), np.zeros_like(real)
        size = [ends[row][number] - first[row][number] for row in range(2)]
        for row in range(2):
            at = slice(first[row][number], ends[row][number])
            own[row, : size[row]], moved[row, : size[row]] = x[row, at], real[row, at]
            begun[row, 0] = True
        expected, _, after, waiting = stream(own, begun, moved)
        for row in range(2):
            at, kept = slice(first[row][number], ends[row][number]), moved[row, : size[row]]
            alone = expected[row, : size[row]][kept]
            np.testing.assert_allclose(output[row, at][kept], alone, rtol=1e-11, atol=1e-12)
            if number == 4:
                assert np.max(np.abs(leaky[row, at][kept] - alone)) > 1e-4
    assert_close(memory, after)
    assert_equal(pending.num_waiting, waiting.num_waiting)
    assert_close(pending.tokens, waiting.tokens)
    # No token is paired with a value of another document: the last ones have no loss.
    last = np.roll(starts, -1, axis=1)
    assert not np.any(losses[last])
    assert np.all(losses[real & ~last & np.roll(real, -1, axis=1)][:3] > 0)


@pytest.mark.thorough
def test_documents_of_their_own_need_a_memory_for_each_sequence():
    config = dataclasses.replace(CONFIG, documents="document")
    layer, memory = layer_of(params_of(config), config), start(config=config)
    with pytest.raises(ValueError, match="documents='document' with 1 memories for 2 sequences"):
        layer(sample(), memory, starts=jnp.zeros((BATCH, LENGTH), bool))
    pending = layer.init_pending(BATCH, 1, max_chunk_size=CHUNK, dtype=jnp.float64)
    documents = {"starts": jnp.zeros((BATCH, LENGTH), bool), "initial": memory}
    with pytest.raises(ValueError, match="documents='document' with 1 memories for 2 sequences"):
        layer.stream(sample(), memory, pending, **documents)
    with pytest.raises(ValueError, match="initial=None with documents='document': documents that"):
        layer.stream(sample(), memory, pending, starts=documents["starts"])
