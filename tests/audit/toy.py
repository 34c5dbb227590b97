"""A program in NumPy that keeps a memory, with places to plant faults in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

VOCAB, DIM = 12, 6
Fault = Callable[["Toy", np.ndarray, "State"], np.ndarray]


@dataclass(frozen=True)
class State:
    """What rows have read: a memory each, the last inputs, and the position."""

    memory: np.ndarray
    """`[rows, DIM]`."""
    window: np.ndarray
    """`[rows, 3, DIM]`, the last inputs."""
    queue: np.ndarray
    """`[rows, DIM]`, sum of the inputs that wait for a write."""
    position: int


class Toy:
    """A window over four inputs, and a memory that is written after each chunk."""

    vocab_size = VOCAB

    def __init__(
        self, fault: Fault = lambda toy, x, state: x, *, chunk: int = 8, keeps: bool = True
    ):
        rng = np.random.default_rng(0)
        self.embedding = rng.normal(size=(VOCAB, DIM))
        self.mix = rng.normal(size=(DIM, DIM)) / DIM**0.5
        self.head = rng.normal(size=(DIM, VOCAB)) / DIM**0.5
        self.fault, self.chunk, self.keeps = fault, chunk, keeps
        self.noise = np.random.default_rng(1)
        self.log: list[Any] = []  # What a faulty program keeps from call to call.

    def start(self, rows: int, length: int) -> State:
        del length  # A window has room for any text.
        none = np.zeros((rows, DIM))
        return State(none, np.zeros((rows, 3, DIM)), none, 0)

    def read(self, state: State, tokens: np.ndarray, *, write: bool) -> tuple[np.ndarray, State]:
        x = self.fault(self, self.embedding[tokens], state)
        seen = np.concatenate([state.window, x], axis=1)
        windows = np.sum([seen[:, back : back + x.shape[1]] for back in range(4)], axis=0)
        hidden, memory, queue = np.zeros_like(x), state.memory, state.queue
        for place in range(x.shape[1]):
            hidden[:, place] = np.tanh(windows[:, place] + memory @ self.mix)
            if write and self.keeps:
                queue = queue + x[:, place]
                if (state.position + place + 1) % self.chunk == 0:
                    memory, queue = np.tanh(0.9 * memory + queue @ self.mix), 0 * queue
        after = State(memory, seen[:, -3:], queue, state.position + x.shape[1])
        return (hidden @ self.head).astype(np.float32), after

    def memory(self, state: State) -> dict[str, np.ndarray]:
        return {"matrix": state.memory} if self.keeps else {}

    def restart(self, state: State) -> State:
        fresh = self.start(len(state.memory), 0)
        return replace(fresh, memory=state.memory)
