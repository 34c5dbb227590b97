"""Trains small models whose documents and weights fit in memory: many updates in one call."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = Any
"""A pytree whose leaves begin with the documents."""


class Progress(NamedTuple):
    """Weights, the optimiser's state and the number of updates made."""

    params: Any
    opt_state: Any
    step: jax.Array


class Trainer:
    """One compiled function that makes many updates of one architecture, from any weights."""

    def __init__(
        self,
        loss: Callable[[Any, Any, Batch], jax.Array],
        optimizer: optax.GradientTransformation,
        *,
        rows: int | None = None,
        draw: Callable[[Batch, jax.Array], Batch] | None = None,
    ):
        """Compiles nothing yet.

        Args:
          loss: of weights, of what is not trained and of a batch; its mean in nats.
          optimizer: makes the steps of an update.
          rows: documents computed at a time, whose gradients are averaged; None: all of a batch.
          draw: adds what is random to an update's batch, from a key of its own; None: nothing is.
        """
        self._loss, self._optimizer = loss, optimizer
        self._rows, self._draw = rows, draw
        self._train = jax.jit(self._updates, donate_argnums=0)

    def start(self, params: Any) -> Progress:
        """The state before the first update."""
        return Progress(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def train(
        self, state: Progress, fixed: Any, blocks: Iterable[Batch], *, seed: int, rate: float = 1.0
    ) -> tuple[Progress, np.ndarray]:
        """Trains on blocks of batches; also the loss of each update, in nats.

        Args:
          state: is used up.
          fixed: what is not trained.
          blocks: pytrees `[updates, batch, ...]`, one call each.
          seed: of what is drawn in an update, together with the update's number.
          rate: multiplies the steps of the optimiser.
        """
        losses, rng = [], jax.random.key(seed, impl="rbg")
        for block in blocks:
            state, loss = self._train(state, fixed, block, jnp.float32(rate), rng)
            losses.append(np.asarray(loss))
        return state, np.concatenate(losses)

    def _updates(self, state: Progress, fixed: Any, block: Batch, rate: jax.Array, rng: jax.Array):
        def update(state: Progress, batch: Batch):
            if self._draw is not None:
                batch = self._draw(batch, jax.random.fold_in(rng, state.step))
            loss, gradient = self._gradient(state.params, fixed, batch)
            steps, opt_state = self._optimizer.update(gradient, state.opt_state, state.params)
            params = jax.tree.map(lambda p, step: p + rate * step, state.params, steps)
            return Progress(params, opt_state, state.step + 1), loss

        return jax.lax.scan(update, state, block)

    def _gradient(self, params: Any, fixed: Any, batch: Batch) -> tuple[jax.Array, Any]:
        """The loss of a batch and its gradient, as means over parts of `rows` documents."""
        value_and_grad = jax.value_and_grad(self._loss)
        size = len(jax.tree.leaves(batch)[0])
        if self._rows is None or self._rows == size:
            return value_and_grad(params, fixed, batch)
        parts = size // self._rows

        def add(total: Any, part: Batch):
            return jax.tree.map(jnp.add, total, value_and_grad(params, fixed, part)), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
        total, _ = jax.lax.scan(add, zero, split)
        return jax.tree.map(lambda x: x / parts, total)


def stacked(batches: Iterable[Batch], size: int) -> Iterable[Batch]:
    """Blocks of `size` batches each; the last one may have fewer."""
    block: list[Batch] = []
    for batch in batches:
        block.append(batch)
        if len(block) == size:
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *block)
            block = []
    if block:
        yield jax.tree.map(lambda *leaves: np.stack(leaves), *block)
