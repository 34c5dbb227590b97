"""What stands for the authors' release is what their files' README says, where no file shows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.rules import FwMLP
from tests.golden import release


@pytest.mark.thorough
def test_a_masked_step_of_the_fast_mlp_is_that_of_a_mean_over_all_pairs():
    """Pairs whose query is masked add nothing, and are counted."""
    rule = FwMLP(key_dim=3, value_dim=2, hidden_dim=4, learning_rate=1.0)
    rng = np.random.default_rng(0)
    batch, chunk, lookahead = 2, 5, 1
    with jax.enable_x64(True):
        query = jnp.asarray(rng.normal(size=(batch, chunk, 1, 3)))
        value = jnp.asarray(rng.normal(size=(batch, chunk, 2)))
        mask = jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]], jnp.float64)
        memory = jax.tree.map(lambda x: x.astype(jnp.float64), rule.init(jax.random.key(0)))

        @jax.jit
        def run(memory):
            sequence = rule.sequence(
                query, value, mask=mask, chunk_size=chunk, pairing=release.mlp_pairing
            )
            return rule.run(memory, sequence, chunk_size=chunk).memory

        @jax.jit
        def expected(memory):
            def loss(memory):
                read = rule.read(memory, query.reshape(-1, 1, 3))[0].reshape(batch, chunk, 2)
                errors = jnp.mean((read[:, :-lookahead] - value[:, lookahead:]) ** 2, axis=-1)
                return jnp.mean(errors * mask[:, :-lookahead])

            return jax.tree.map(jnp.subtract, memory, jax.grad(loss)(memory))

        for actual, wanted in zip(run(memory), expected(memory), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-14)
