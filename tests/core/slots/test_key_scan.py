"""What the scan of the keys refuses; that it equals the scan of steps is tests/rules/test_two_phase."""

import jax.numpy as jnp
import pytest

from fwpkm_jax.core.slots.addressing import best_sub_keys
from fwpkm_jax.core.slots.key_scan import key_scan
from fwpkm_jax.core.slots.key_write import KeyWrite


def test_a_write_that_clips_is_refused():
    key_write = KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw", clip=0.5)
    keys, queries, weights = jnp.zeros((1, 2, 4, 3)), jnp.zeros((2, 5, 1, 6)), jnp.ones((2, 5))
    with pytest.raises(ValueError, match=r"clip=0\.5 of a key write"):
        key_scan(keys, queries, weights, find=best_sub_keys, key_write=key_write)
