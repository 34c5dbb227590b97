"""The chunked engine against a plain loop: every combination, strong decays, linear memory."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.recurrence.linear_recurrence import Erasure, Together, chunk_recurrence

BATCH, HEADS, KEY, VALUE = 1, 2, 4, 3


def sample(*, length=7, steps=1, decay="head", delta=True, read="key", seed=0, strong=False):
    """Float64 NumPy arguments by name; with `strong`, decays from 1 to exactly 0."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    writes = length * steps
    log_decay = None
    if decay != "none":
        shape = (BATCH, length, HEADS) + (KEY,) * (decay == "key")
        log_decay = -(rng.exponential(size=shape) ** 3)
        if strong:
            levels = np.array([0, -1e-3, -1, -30, -90, -1e3, -2e4, -np.inf])
            log_decay = rng.choice(levels, size=shape)
    return {
        "query": unit(BATCH, length, HEADS, KEY if read == "key" else VALUE),
        "key": unit(BATCH, writes, HEADS, KEY),
        "value": rng.normal(size=(BATCH, writes, HEADS, VALUE)),
        "log_decay": log_decay,
        "beta": rng.uniform(0, 2, size=(BATCH, writes, HEADS)) if delta else None,
        "initial_state": rng.normal(size=(BATCH, HEADS, KEY, VALUE)),
    }


def plain_loop(arguments, read="key", together=False):
    """The recurrence, one write and head at a time."""
    query, key, value, log_decay, beta, start = arguments.values()
    length, steps = query.shape[1], key.shape[1] // query.shape[1]
    states, outputs = start.copy(), []
    for t, h in np.ndindex(length, HEADS):
        state = states[0, h]
        if log_decay is not None:
            state = np.exp(np.broadcast_to(log_decay[0, t, h], KEY))[:, None] * state
        before = state
        for s in range(t * steps, (t + 1) * steps):
            target = value[0, s, h]
            if beta is not None:
                target = beta[0, s, h] * (target - (before if together else state).T @ key[0, s, h])
            state = state + np.outer(key[0, s, h], target)
        states[0, h] = state
        outputs.append((state.T if read == "key" else state) @ query[0, t, h])
    return np.reshape(outputs, (1, length, HEADS, -1)), states


def run(arguments, *, read="key", chunk_size=4, **options):
    arguments = dict(arguments)
    arrays = [arguments.pop(name) for name in ("query", "key", "value")]
    options |= {"read": read, "chunk_size": chunk_size}
    return chunk_recurrence(*arrays, **arguments, **options)


def to_jax(arguments, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"decay": "none", "delta": False},
        {"decay": "key", "delta": True},
        {"decay": "key", "delta": True, "steps": 2},
        {"decay": "key", "delta": False, "strong": True},
        {"decay": "head", "delta": True, "strong": True, "steps": 3},
        {"decay": "head", "delta": True, "read": "value", "strong": True},
        {"decay": "key", "delta": False, "read": "value", "strong": True},
        {"decay": "key", "delta": True, "read": "value"},
        {"decay": "head", "delta": True, "steps": 3, "together": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("float64")
def test_chunks_equal_the_plain_loop(options):
    read, together = options.get("read", "key"), options.get("together", False)
    arguments = sample(length=9, **{name: x for name, x in options.items() if name != "together"})
    # A chunk's size need be neither a power of two nor a multiple of the steps.
    given = to_jax(arguments, jnp.float64)
    if together:
        given["beta"] = Together(given["beta"])
    actual = jax.jit(lambda x: run(x, chunk_size=7, read=read))(given)
    expected = plain_loop(arguments, read=read, together=together)
    chex.assert_trees_all_close(tuple(actual), expected, rtol=1e-10, atol=1e-12)


def test_any_decay_keeps_float32_exact_and_gradients_finite():
    arguments = sample(length=40, decay="key", delta=False, strong=True)

    @jax.jit
    def outputs_and_gradients(arguments):
        def loss(arguments):
            out = run(arguments, chunk_size=32)
            return jnp.sum(jnp.sin(out.output)), out

        return jax.grad(loss, has_aux=True)(arguments)

    gradients, actual = outputs_and_gradients(to_jax(arguments, jnp.float32))
    chex.assert_trees_all_close(tuple(actual), plain_loop(arguments), rtol=1e-5, atol=1e-5)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("channels", [(), (32,)], ids=["per_head", "per_channel"])
def test_a_large_batch_of_one_chunk_equals_its_sequences_alone(channels):
    """Only large products go to XLA's library for CPUs, which may fuse what is around them, too."""
    rng = np.random.default_rng(0)
    length = 12 if channels else 64
    query, key, value = rng.normal(size=(3, 64, length, 2, 32)).astype(np.float32)
    log_decay = -rng.exponential(size=(64, length, 2, *channels)).astype(np.float32)

    def read(query, key, value, log_decay):
        recurrence = chunk_recurrence(query, key, value, log_decay=log_decay, beta=None)
        return recurrence.output

    alone = jax.jit(lambda *arrays: jax.lax.map(lambda x: read(*(y[None] for y in x))[0], arrays))
    expected = alone(query, key, value, log_decay)
    for _ in range(3):  # What unwritten memory holds differs from program to program.
        together = jax.jit(lambda *arrays: read(*arrays))(query, key, value, log_decay)
        np.testing.assert_allclose(together, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_memory_of_training_grows_with_the_length_and_not_faster():
    def temporary_bytes(length):
        shape = jax.ShapeDtypeStruct
        tokens = {
            name: shape((1, length, 1, 16), jnp.float32) for name in ("query", "key", "value")
        }
        tokens |= {"log_decay": tokens["key"], "beta": shape((1, length, 1), jnp.float32)}

        def loss(tokens):
            return jnp.sum(run(tokens, chunk_size=16).output ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(512), temporary_bytes(1024)
    assert long < 2.2 * short


def test_arguments_that_do_not_fit_are_named():
    arguments = to_jax(sample(), jnp.float32)
    with pytest.raises(ValueError, match="chunk_size=0 is not positive"):
        run(arguments, chunk_size=0)
    with pytest.raises(ValueError, match="5 keys for 7 queries"):
        run(arguments | {name: arguments[name][:, :5] for name in ("key", "value", "beta")})
    along_values = to_jax(sample(decay="key", read="value", steps=2), jnp.float32)
    with pytest.raises(ValueError, match="takes one write per token, got 2"):
        run(along_values, read="value")
    erasure = Erasure(arguments["key"], arguments["key"])
    with pytest.raises(ValueError, match="takes no beta, one write per token"):
        run(arguments, erasure=erasure)
