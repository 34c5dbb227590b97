"""A state that goes from device to device: for steps whose parts cannot be composed."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fwpkm_jax.core.sequence.axis import SequenceAxis


def sequential_pass(
    step: Callable[[Any, Any], Any], state: Any, inputs: Any, *, axis: SequenceAxis
) -> Any:
    """The state before this device's part, where device i waits for the end of device i - 1.

    Devices send states only, whose size does not depend on the length. They overlap by batch rows:
    the sequences are cut into `m = gcd(batch, devices)` groups, and while a device works on one
    group the next device works on the group before. With n devices this takes the time of
    `(n + m - 1) / m` parts, against n for one group. Outputs do not count: each device computes
    them afterwards from the state returned here.

    Args:
      step: the state after a part from the state before it and the part's inputs. It must treat
        sequences alike and apart.
      state: before the whole sequence, leaves `[batch, ...]`, equal on all devices.
      inputs: of the part, leaves `[batch, ...]`.
    """
    batch = jax.tree.leaves(state)[0].shape[0]
    groups = math.gcd(batch, axis.size)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(groups, batch // groups, *x.shape[1:])

    inputs, start = jax.tree.map(cut, inputs), jax.tree.map(cut, state)

    def work(number: jax.Array, held: Any) -> Any:
        state, part = jax.tree.map(lambda x: x[number], (held, inputs))
        return step(state, part)

    def wait(number: jax.Array, held: Any) -> Any:
        return jax.tree.map(lambda x: x[number], held)

    # The backward pass computes each round again from the states.
    @jax.checkpoint
    def round_of(held: Any, time: jax.Array) -> tuple[Any, None]:
        number = time - axis.index
        has_work = (number >= 0) & (number < groups)
        place = jnp.clip(number, 0, groups - 1)
        end = axis.shift(jax.lax.cond(has_work, work, wait, place, held))
        # What comes is of the group that the device before had: this device's next.
        comes = (axis.index > 0) & (number + 1 >= 0) & (number + 1 < groups)
        place = jnp.clip(number + 1, 0, groups - 1)
        held = jax.tree.map(
            lambda x, new: x.at[place].set(jnp.where(comes, new, x[place])), held, end
        )
        return held, None

    rounds = axis.size + groups - 2  # The last device's own end is computed with its outputs.
    held, _ = jax.lax.scan(round_of, start, jnp.arange(rounds, dtype=jnp.int32))
    return jax.tree.map(lambda x, like: x.reshape(like.shape), held, state)
