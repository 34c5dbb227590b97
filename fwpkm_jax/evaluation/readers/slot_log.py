"""Logs which token wrote last into each slot."""

import array
from typing import NamedTuple

import numpy as np

_BEFORE, _AFTER = 10, 9  # Tokens kept around a target.


class Entry(NamedTuple):
    """The latest write into a slot.

    Attributes:
      query: id of the token whose query chose the slot.
      target: id of the token whose value was written; it follows the query at the lookahead.
      before: ids of tokens before the target, the oldest first; the query is one of them.
      after: ids of tokens after the target.
      score: score of the slot for the query, unnormalised.
      age: number of later writes into the memory; 0 for the latest.
      position: position of the query among all tokens read.
      writers: number of tokens that wrote into the slot in the same write.
    """

    query: int
    target: int
    before: list[int]
    after: list[int]
    score: float
    age: int
    position: int
    writers: int


class SlotLog:
    """The latest write into each slot of one memory."""

    def __init__(self, num_slots: int):
        """Creates a log without writes."""
        self.position = np.full(num_slots, -1, np.int64)
        self.score = np.zeros(num_slots, np.float32)
        self.write = np.full(num_slots, -1, np.int32)
        self.writers = np.zeros(num_slots, np.int32)

    def add(
        self, slot_ids: np.ndarray, scores: np.ndarray, *, first_position: int, write: int
    ) -> None:
        """Logs one write.

        Args:
          slot_ids: slots that each token wrote into, `[tokens, places]`, in the order of the text.
          scores: their scores, `[tokens, places]`.
          first_position: position of the first token among all tokens read.
          write: index of the write.
        """
        tokens, places = slot_ids.shape
        positions = np.repeat(first_position + np.arange(tokens), places)
        slots = slot_ids.ravel()
        # If a slot occurs several times, NumPy keeps the last assignment: the latest token.
        self.position[slots] = positions
        self.score[slots] = scores.ravel()
        self.write[slots] = write
        touched, counts = np.unique(slots, return_counts=True)
        self.writers[touched] = counts

    def entry(
        self, slot: int, tokens: array.array, *, lookahead: int, num_writes: int
    ) -> Entry | None:
        """A slot's latest write; None if the slot was never written.

        Args:
          tokens: all tokens read, in order.
          lookahead: distance from a query to its target.
          num_writes: writes into the memory so far.
        """
        position = int(self.position[slot])
        if position < 0:
            return None
        target = position + lookahead
        return Entry(
            query=tokens[position],
            target=tokens[target],
            before=tokens[max(0, target - _BEFORE) : target].tolist(),
            after=tokens[target + 1 : target + 1 + _AFTER].tolist(),
            score=float(self.score[slot]),
            age=num_writes - 1 - int(self.write[slot]),
            position=position,
            writers=int(self.writers[slot]),
        )
