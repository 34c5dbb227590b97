"""What the scan of the keys refuses; its results are compared in tests/rules/test_two_phase.py."""

import functools

import jax.numpy as jnp
import pytest

from fwpkm_jax.core.slots.keys.addressing import best_sub_keys
from fwpkm_jax.core.slots.keys.scan import KeyLoops
from fwpkm_jax.core.slots.two_phase import move_keys
from fwpkm_jax.core.slots.write import KeyWrite


def test_a_write_that_clips_is_refused():
    key_write = KeyWrite(learning_rate=1.0, loss_weight=1.0, score="idw", clip=0.5)
    keys, queries, weights = jnp.zeros((1, 2, 4, 3)), jnp.zeros((2, 5, 1, 6)), jnp.ones((2, 5))
    find = functools.partial(best_sub_keys, top_k=2)
    with pytest.raises(ValueError, match=r"clip=0\.5 of a key write"):
        move_keys(keys, queries, weights, find=find, key_write=key_write, loops=KeyLoops())
