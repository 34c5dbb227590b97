"""Tokens that are written again with every chunk: which are kept, and what their writes do."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.slots.options.replay import no_replayed_tokens, remember
from fwpkm_jax.core.slots.write import SlotChunk
from fwpkm_jax.rules import FwPKM, Retention

pytestmark = pytest.mark.usefixtures("float64")
PLAIN = FwPKM.tiny()
RULE = replace(PLAIN, retention=Retention(replay=3))
STEP = jax.jit(RULE.step)


def chunk_of(rng, *write_weight):
    tokens, weight = len(write_weight), jnp.asarray(write_weight)
    query = jnp.asarray(rng.normal(size=(tokens, PLAIN.num_heads, PLAIN.key_dim)))
    target = jnp.asarray(rng.normal(size=(tokens, PLAIN.value_dim)))
    counted = (weight > 0).astype(weight.dtype)
    return SlotChunk(query, target, weight, paired=counted, counted=counted, addressed=counted)


def joined(*chunks):
    return jax.tree.map(lambda *x: jnp.concatenate(x), *chunks)


def start():
    memory = PLAIN.init(jax.random.key(0))
    memory = jax.tree.map(lambda x: x.astype(jnp.float64), memory)
    return memory, RULE.init(jax.random.key(0)).history


@pytest.mark.thorough
def test_the_strongest_tokens_are_kept_and_of_equals_the_first():
    memory, _ = start()
    rng, store = np.random.default_rng(0), no_replayed_tokens(3, memory.keys, memory.values)
    first, second = chunk_of(rng, 0.2, 0.9, 0.0), chunk_of(rng, 0.9, 0.5, 0.1)
    store = remember(store, first)
    np.testing.assert_array_equal(store.write_weight, [0.9, 0.2, 0.0])
    store = remember(store, second)
    np.testing.assert_array_equal(store.write_weight, [0.9, 0.9, 0.5])
    expected = [first.target[1], second.target[0], second.target[1]]
    np.testing.assert_array_equal(store.target, expected)
    np.testing.assert_array_equal(store.query[0], first.query[1])


@pytest.mark.thorough
def test_the_stored_tokens_are_written_before_each_chunk():
    rng = np.random.default_rng(1)
    plain_step = jax.jit(PLAIN.step)
    still_step = jax.jit(replace(PLAIN, addressing_weight=0.0).step)
    plain, history = start()
    ours = plain._replace(history=jax.tree.map(lambda x: x.astype(jnp.float64), history))
    stored = None
    for chunk in (chunk_of(rng, *rng.uniform(0.1, 1.0, size=4)) for _ in range(3)):
        before = plain if stored is None else still_step(plain, stored).memory
        step = plain_step(before, chunk)
        out = STEP(ours, chunk)
        np.testing.assert_allclose(out.memory.values, step.memory.values, rtol=1e-12)
        np.testing.assert_allclose(out.memory.keys, step.memory.keys, rtol=1e-12)
        # It is read before anything is written, and both steps are measured.
        np.testing.assert_allclose(out.output, PLAIN.read(plain, chunk.query)[0], rtol=1e-12)
        changes = before.values - plain.values, step.memory.values - before.values
        norm = jnp.linalg.norm(jnp.stack(changes))
        np.testing.assert_allclose(out.info.update_norm, norm, rtol=1e-12)
        plain, ours = step.memory, out.memory
        every = chunk if stored is None else joined(stored, chunk)
        best = jnp.argsort(-every.write_weight)[:3]
        stored = jax.tree.map(lambda x, best=best: x[best], every)


@pytest.mark.thorough
def test_a_chunk_without_tokens_writes_nothing_again():
    rng = np.random.default_rng(2)
    memory, history = start()
    memory = memory._replace(history=jax.tree.map(lambda x: x.astype(jnp.float64), history))
    memory = STEP(memory, chunk_of(rng, 0.5, 0.8)).memory
    after = STEP(memory, chunk_of(rng, 0.0, 0.0)).memory
    jax.tree.map(np.testing.assert_array_equal, after, memory)
