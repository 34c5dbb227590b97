"""The memory block: gate, gradients through writes, frozen reads, streams, groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fwpkm_jax.layers.fast_weight import FastWeight, FastWeightConfig
from fwpkm_jax.rules import FwPKM

CONFIG = FastWeightConfig(
    rule=FwPKM(num_subkeys=5, key_dim=6, value_dim=4, num_heads=2, top_k=3), chunk_size=4
)
BATCH, LENGTH, WIDTH = 2, 10, 8


@functools.cache
def layer():
    with jax.ensure_compile_time_eval():  # Also when a traced function asks first.
        return FastWeight(CONFIG, WIDTH, norm_eps=1e-5, init_std=0.5, rngs=nnx.Rngs(0))


def hidden(seed=0, length=LENGTH):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def memory(groups=1):
    return layer().init_memory(jax.random.key(1), groups=groups)


@functools.partial(jax.jit, static_argnames=("write",))
def run(x, memory, mask=None, *, write=True):
    return layer()(x, memory, mask=mask, write=write)


def assert_close(actual, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def test_with_a_closed_gate_the_memory_is_not_seen():
    closed = nnx.clone(layer())
    closed.gate_proj.bias.set_value(jnp.full((8,), -1e4))
    one, _, info = closed(hidden(), memory())
    other, _, _ = closed(hidden(), jax.tree.map(lambda x: x + 1.0, memory()))
    assert np.all(info.gate == 0.0)
    np.testing.assert_array_equal(one, other)


def test_a_frozen_pass_returns_the_memory_as_it_came():
    out, after, info = run(hidden(), memory(), write=False)
    jax.tree.map(np.testing.assert_array_equal, after, memory())
    assert info.update_norm == 0.0
    # The first chunk is read before any write in both.
    written, _, _ = run(hidden(), memory())
    chunk = CONFIG.chunk_size
    assert_close(out[:, :chunk], written[:, :chunk], 1e-6)
    assert np.any(out[:, chunk:] != written[:, chunk:])


@pytest.mark.parametrize("padding", [1, 5])
def test_padding_writes_nothing(padding):
    real = LENGTH - padding
    mask = jnp.broadcast_to((jnp.arange(LENGTH) < real).astype(jnp.float32), (BATCH, LENGTH))
    noisy = hidden().at[:, real:].set(7.0)
    one, after, _ = run(hidden(), memory(), mask)
    two, after_noise, _ = run(noisy, memory(), mask)
    np.testing.assert_array_equal(one[:, :real], two[:, :real])
    jax.tree.map(np.testing.assert_array_equal, after, after_noise)
    unpadded, after_unpadded, _ = run(hidden()[:, :real], memory())
    assert_close(one[:, :real], unpadded)
    assert_close(after, after_unpadded)


@pytest.mark.parametrize("name", ["query_proj", "value_proj", "gate_proj"])
def test_gradients_flow_through_the_writes(name):
    # The loss sees the second chunk alone; the first reaches it only through what it wrote.
    chunk = CONFIG.chunk_size
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), nnx.state(layer()))
        x = jnp.asarray(hidden(length=2 * chunk), jnp.float64)
        start = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), memory())
        graphdef = nnx.graphdef(layer())

        @jax.jit
        def loss(first):
            both = jnp.concatenate([first, x[:, chunk:]], axis=1)
            out, _, _ = nnx.merge(graphdef, wide)(both, start)
            return jnp.sum(out[:, chunk:] ** 2)

        gradient = jax.grad(loss)(x[:, :chunk])
        direction = jax.random.normal(jax.random.key(5), gradient.shape, jnp.float64)
        step = 1e-6
        slope = (loss(x[:, :chunk] + step * direction) - loss(x[:, :chunk] - step * direction)) / (
            2 * step
        )
        np.testing.assert_allclose(jnp.sum(gradient * direction), slope, rtol=1e-5)

        def of_weights(kernel):
            changed = nnx.clone(nnx.merge(graphdef, wide))
            getattr(changed, name).kernel.set_value(kernel)
            read = changed(x, start)[1]
            return jnp.sum(read.values**2)

        kernel = getattr(nnx.merge(graphdef, wide), name).kernel[...]
        assert np.any(np.abs(jax.jit(jax.grad(of_weights))(kernel)) > 1e-6)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("cuts", [[3, 5], [1, 2, 3, 9]])
def test_a_stream_in_pieces_equals_the_stream_at_once(groups, cuts):
    @jax.jit
    def push(x, memory, pending):
        return layer().stream(x, memory, pending)[:3]

    def pending():
        return layer().init_pending(BATCH, groups, max_chunk_size=4, dtype=jnp.float32)

    whole, after, left = push(hidden(), memory(groups), pending())
    state, outputs = (memory(groups), pending()), []
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        out, *state = push(hidden()[:, begin:end], *state)
        outputs.append(out)
    assert_close(jnp.concatenate(outputs, axis=1), whole)
    assert_close(state[0], after)
    assert int(state[1].num_waiting) == int(left.num_waiting)


def test_one_memory_per_sequence_keeps_sequences_apart():
    changed = hidden().at[1].add(1.0)
    one, after, _ = run(hidden(), memory(2))
    two, after_change, _ = run(changed, memory(2))
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(after.values[0], after_change.values[0])
    assert np.any(np.asarray(after.values[1]) != after_change.values[1])


def test_a_chunk_that_never_writes_is_refused():
    with pytest.raises(ValueError, match=r"chunk_size=1 must exceed rule.lookahead=1"):
        FastWeightConfig(chunk_size=1)


def test_groups_must_divide_the_batch():
    with pytest.raises(ValueError, match="2 sequences does not divide into 3"):
        run(hidden(), memory(3))
