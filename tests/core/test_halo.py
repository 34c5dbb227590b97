"""The tokens right before each part of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fwpkm_jax.core.sequence.axis import SequenceAxis
from fwpkm_jax.core.sequence.halo import halo_exchange


class MappedAxis(SequenceAxis):
    """An axis of `jax.vmap`, which only takes permutations of all parts."""

    def shift(self, tree, *, by=1):
        pairs = [(source, (source + by) % self.size) for source in range(self.size)]

        def shifted(x):
            return jnp.where(self.index < by, 0, jax.lax.ppermute(x, self.name, pairs))

        return jax.tree.map(shifted, tree)


AXIS = MappedAxis("parts", 4)


@pytest.mark.parametrize("width", [0, 1, 3, 4, 5, 12], ids=lambda width: f"{width}_tokens")
@pytest.mark.parametrize("counted", [False, True], ids=["all_real", "counted"])
def test_tokens_before_a_part_are_those_of_the_whole_sequence(width, counted):
    batch, length = 2, 3
    numbers = jnp.arange(1.0, 1 + batch * AXIS.size * length).reshape(batch, AXIS.size, length)
    first = -jnp.arange(1.0, 1 + batch * width).reshape(batch, width)
    counts = jnp.full((batch,), length) if counted else None

    def of_a_part(part):
        return halo_exchange(part, first, axis=AXIS, counts=counts)

    parts = jnp.swapaxes(numbers, 0, 1)
    before = jax.jit(jax.vmap(of_a_part, axis_name=AXIS.name))(parts)
    whole = np.concatenate([first, numbers.reshape(batch, -1)], axis=1)
    for part in range(AXIS.size):
        start = part * length
        np.testing.assert_array_equal(before[part], whole[:, start : start + width])
