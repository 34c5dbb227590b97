"""The memory block: its formulas, gate, padding, streams, groups and gradients through writes."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from fwpkm_jax.layers.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import FwMLP, FwPKM

MODEL, BATCH, LENGTH, CHUNK = 6, 2, 8, 3
CONFIG = FastWeightConfig(
    rule=FwPKM(num_subkeys=4, key_dim=6, value_dim=5, num_heads=2, top_k=2), chunk_size=CHUNK
)


@functools.cache
def build(config=CONFIG):
    """The layer's structure and its parameters, every one away from where it starts."""
    layer = FastWeight(config, MODEL, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    noise = np.random.default_rng(0)
    return graphdef, jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * noise.normal(size=x.shape), params
    )


@functools.partial(jax.jit, static_argnames=("config", "write"))
def whole(params, x, memory, mask=None, *, config=CONFIG, write=True):
    return nnx.merge(build(config)[0], params)(x, memory, mask=mask, write=write)


@functools.partial(jax.jit, static_argnames=("write", "chunk_size"))
def piece(params, x, memory, pending, mask=None, *, write=True, chunk_size=None):
    layer = layer_of(params)
    return layer.stream(x, memory, pending, mask=mask, write=write, chunk_size=chunk_size)


@jax.jit
def jitted_flush(params, memory, pending):
    return layer_of(params).flush(memory, pending)


def params_of(config=CONFIG):
    return jax.tree.map(jnp.asarray, build(config)[1])


def layer_of(params, config=CONFIG):
    return nnx.merge(build(config)[0], params)


def start(*, groups=1, config=CONFIG):
    memory = layer_of(params_of(config), config).init_memory(jax.random.key(1), groups=groups)
    return jax.tree.map(lambda x: x.astype(jnp.float64), memory)


def sample(length=LENGTH, batch=BATCH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(batch, length, MODEL)))


def with_gate(params, bias):
    """The parameters with a gate of sigmoid(bias), whatever comes in."""
    params = jax.tree.map(lambda x: x, params)
    params.gate_proj.kernel[...] = jnp.zeros_like(params.gate_proj.kernel[...])
    params.gate_proj.bias[...] = jnp.full_like(params.gate_proj.bias[...], bias)
    return params


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


pytestmark = pytest.mark.usefixtures("float64")


def plain_norm(x, weight):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * (1 + weight)


def plain_linear(x, linear):
    return x @ np.asarray(linear.kernel[...]) + np.asarray(linear.bias[...])


@pytest.mark.parametrize("query_norm", ["none", "standardize", "l2"])
@pytest.mark.parametrize("gate_output", [True, False])
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
    assert_close(y, np.asarray(x) + plain_linear(mixed, layer.out_proj))
    assert_close(jax.tree.map(lambda x: x[0], after), expected.memory)
    assert_close(info.gate, gate)
    np.testing.assert_array_equal(info.slot_ids, expected.access.slot_ids)


def test_a_closed_gate_hides_the_memory_and_writes_no_value():
    params, memory, x = with_gate(params_of(), -1e4), start(), sample()
    other = jax.tree.map(lambda x: x + 1, memory)
    one, two = (whole(params, x, m) for m in (memory, other))
    assert_equal(one[0], two[0])
    assert_equal(one[1].values, memory.values)
    opened = with_gate(params_of(), 0.0)
    assert np.any(whole(opened, x, memory)[0] != whole(opened, x, other)[0])


def test_an_unweighted_loss_writes_behind_a_closed_gate():
    config = dataclasses.replace(CONFIG, weight_by_gate=False)
    params, memory, x = with_gate(params_of(config), -1e4), start(config=config), sample()
    first = whole(params, x, memory, config=config)[1]
    assert np.any(first.values != memory.values)
    opened = whole(with_gate(params_of(config), 2.0), x, memory, config=config)[1]
    assert_close(opened, first)


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


def test_later_tokens_and_targets_change_no_earlier_output():
    params, memory, x = params_of(), start(), sample()
    y = whole(params, x, memory)[0]
    for position in range(1, LENGTH):
        changed = whole(params, x.at[:, position:].multiply(-1), memory)[0]
        assert_equal(changed[:, :position], y[:, :position])


def flush(memory, pending):
    return jitted_flush(params_of(), memory, pending)[0]


def in_pieces(lengths, x, memory, mask=None, **options):
    groups = jax.tree.leaves(memory)[0].shape[0]
    pending = layer_of(params_of()).init_pending(BATCH, groups, max_chunk_size=4, dtype=jnp.float64)
    outputs, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        masked = None if mask is None else mask[:, part]
        y, memory, pending, _ = piece(params_of(), x[:, part], memory, pending, masked, **options)
        outputs.append(y)
        first += length
    return np.concatenate(outputs, axis=1), memory, pending


@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([1, 3, 8]), min_size=1, max_size=6),
    groups=st.sampled_from([1, BATCH]),
    seed=st.integers(0, 99),
)
def test_a_stream_in_pieces_equals_the_stream_token_by_token(lengths, groups, seed):
    length = sum(lengths)
    memory, x = start(groups=groups), sample(length, seed=seed)
    mask = jnp.asarray(np.random.default_rng(seed).uniform(size=(BATCH, length)) < 0.8, x.dtype)
    output, after, pending = in_pieces(lengths, x, memory, mask)
    expected, expected_after, expected_pending = in_pieces([1] * length, x, memory, mask)
    real = np.asarray(mask)[..., None]  # Padding reads the memory before or after a write.
    assert_close(output * real, expected * real)
    assert_close(after, expected_after)
    # What waits is the same too, up to what stands behind the waiting tokens.
    assert_close(flush(after, pending), flush(expected_after, expected_pending))
    np.testing.assert_array_equal(pending.num_waiting, expected_pending.num_waiting)


def test_padding_takes_no_place_in_the_queue_of_a_memory_of_ones_own():
    """Sequences that own their memories stream as each does alone, wherever padding stands."""
    x = sample(8, seed=3)
    mask = jnp.asarray([[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]], x.dtype)
    for lengths in ([8], [3, 1, 3, 1]):
        output, after, pending = in_pieces(lengths, x, start(groups=BATCH), mask)
        flushed = flush(after, pending)
        for row in range(BATCH):
            real = np.flatnonzero(mask[row])
            both = jnp.repeat(x[row : row + 1, real], BATCH, axis=0)
            alone, after_alone, waiting = in_pieces([1] * len(real), both, start(groups=BATCH))
            assert_close(output[row, real], alone[0])
            assert pending.num_waiting[row] == waiting.num_waiting[0] == (len(real) - 1) % CHUNK + 1
            one = lambda tree, row: jax.tree.map(lambda leaf: leaf[row], tree)  # noqa: E731
            assert_close(one(after, row), one(after_alone, 0))
            assert_close(one(flushed, row), one(flush(after_alone, waiting), 0))


def test_a_stream_with_a_larger_chunk_than_its_queue_is_refused():
    with pytest.raises(ValueError, match="chunk_size=5 with lookahead=1 does not fit a queue of 5"):
        in_pieces([1], sample(), start(), chunk_size=5)


def test_a_flush_writes_the_waiting_pairs_of_every_group():
    memory, x = start(groups=BATCH), sample(3)
    _, memory_before, pending = in_pieces([3], x, memory)
    assert_equal(memory_before, memory)
    flushed, kept = jitted_flush(params_of(), memory_before, pending)
    np.testing.assert_array_equal(kept.num_waiting, [1] * BATCH)
    # The first two tokens have their targets: a chunk of two, followed by its lookahead.
    _, expected, _ = in_pieces([3], x, memory, chunk_size=2)
    assert_close(flushed, expected)
    again, same = jitted_flush(params_of(), flushed, kept)
    assert_equal((again, same), (flushed, kept))


def test_a_frozen_memory_is_read_and_left_alone():
    params, memory, x = params_of(), start(), sample()
    y, after, info = whole(params, x, memory, write=False)
    assert_equal(after, memory)
    assert info.update_norm == 0
    assert info.addressing_loss == 0
    streamed, memory_after, pending = in_pieces([1, 3, 1, 3], x, memory, write=False)
    assert_close(streamed, y)
    assert_equal(memory_after, memory)
    assert pending.num_waiting == 0
    written = whole(params, x, memory)[0]
    assert_close(written[:, :CHUNK], y[:, :CHUNK])
    assert np.all(np.any(written[:, CHUNK:] != y[:, CHUNK:], axis=-1))


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


@pytest.mark.parametrize("name", ["query", "value", "gate"])
def test_gradients_reach_each_projection_through_the_writes(name):
    """The block mixes no tokens: only the writes take the first chunk to later outputs."""
    params, memory, x = params_of(), start(), sample()
    rng = np.random.default_rng(1)
    cotangent = rng.normal(size=x.shape)
    cotangent[:, :CHUNK] = 0
    first = jnp.asarray((np.arange(LENGTH) < CHUNK).astype(np.float64))[None, :, None]
    module = f"{name}_proj"
    direction = jnp.asarray(rng.normal(size=getattr(params, module).kernel[...].shape))

    def matches(path):
        return module in str(path) and "kernel" in str(path)

    @jax.jit
    def loss(step):
        """Moves a projection of the first chunk's tokens alone."""
        layer = layer_of(params)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf + step * direction if matches(path) else leaf, params
        )
        here, there = (one.signals(x, None) for one in (layer, layer_of(moved)))
        signals = jax.tree.map(
            lambda a, b: jnp.where(first.reshape(1, -1, *[1] * (a.ndim - 2)) == 1, b, a),
            here,
            there,
        )
        rule = layer.config.rule
        sequence = rule.sequence(signals.query, signals.value, gate=signals.gate, chunk_size=CHUNK)
        out = rule.run(jax.tree.map(lambda x: x[0], memory), sequence, chunk_size=CHUNK)
        return jnp.sum(jnp.asarray(cotangent) * layer.merge(x, out.output, signals))

    h = 1e-5
    expected = (loss(h) - loss(-h)) / (2 * h)
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(jax.grad(loss)(0.0), expected, rtol=1e-5)


def test_the_incoming_stream_gets_the_gradient_of_finite_differences():
    params, memory, x = params_of(), start(), sample()
    rng = np.random.default_rng(2)
    cotangent, direction = (jnp.asarray(rng.normal(size=x.shape)) for _ in range(2))
    mask = jnp.ones((BATCH, LENGTH)).at[0, 5:].set(0)

    def loss(x):
        return jnp.sum(cotangent * whole(params, x, memory, mask)[0])

    h = 1e-5
    expected = (loss(x + h * direction) - loss(x - h * direction)) / (2 * h)
    np.testing.assert_allclose(jnp.sum(direction * jax.grad(loss)(x)), expected, rtol=1e-5)


def test_bfloat16_activations_leave_a_float32_memory_and_finite_gradients():
    layer = FastWeight(
        CONFIG, MODEL, norm_eps=1e-5, init_std=0.5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graphdef, params = nnx.split(layer)
    memory = layer.init_memory(jax.random.key(0))
    x = sample().astype(jnp.bfloat16)

    @jax.jit
    def gradients(params, x):
        def loss(params, x):
            y, after, _ = nnx.merge(graphdef, params)(x, memory)
            assert y.dtype == jnp.bfloat16
            chex.assert_trees_all_equal_shapes_and_dtypes(after, memory)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(params, x)

    chex.assert_tree_all_finite(jax.tree.leaves(gradients(params, x)))


def test_a_chunk_without_room_for_a_pair_is_refused():
    with pytest.raises(ValueError, match=r"chunk_size=1 must exceed rule\.lookahead=1"):
        dataclasses.replace(CONFIG, chunk_size=1)


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
    assert_close(out, layer.merge(x, expected.output, signals))
    assert_close(jax.tree.map(lambda leaf: leaf[0], after), expected.memory)
    assert info.slot_ids is info.slot_weights is info.measures is None
    assert info.addressing_loss == 0
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
    assert_close(frozen, layer.merge(x, reads, signals))
    errors = (reads[:, :-1] - (values[:, :-1] + values[:, 1:]) / 2) ** 2
    assert_close(facts.token_loss[:, :-1], np.mean(errors, axis=-1))
    assert_equal(facts.token_loss[:, -1], jnp.zeros(BATCH))
    written = stream(x, memory, pending, True)[1]
    assert all(np.any(a != b) for a, b in zip(written, memory, strict=True))
