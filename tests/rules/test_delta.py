"""The delta rule against a plain loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules import DeltaRule
from tests.rules.sampling import sample_signals, to_sequence

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("own_keys", [True, False])
def test_each_token_is_written_and_then_read(own_keys):
    rule = DeltaRule(key_dim=3, value_dim=2)
    signals = sample_signals(rule, batch=1, length=5)
    sequence = to_sequence(rule, signals, chunk_size=5, dtype=jnp.float64)
    chunk = jax.tree.map(lambda x: x[0], sequence)
    if not own_keys:
        chunk = chunk._replace(key=None)
    memory = np.random.default_rng(1).normal(size=(3, 2))
    step = jax.jit(rule.step)(jnp.asarray(memory), chunk)
    keys = np.asarray(chunk.key if own_keys else chunk.query)[:, 0]
    losses = []
    for t in range(5):
        error = np.asarray(chunk.target[t]) - keys[t] @ memory
        memory = memory + np.outer(keys[t], float(chunk.write_weight[t]) * error)
        losses.append(np.mean(error**2))
        np.testing.assert_allclose(step.output[t], chunk.query[t, 0] @ memory, rtol=1e-11)
    np.testing.assert_allclose(step.memory, memory, rtol=1e-11)
    np.testing.assert_allclose(step.info.memory_loss, np.mean(losses), rtol=1e-11)
