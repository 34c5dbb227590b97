"""A generated task: the running product of a sequence of group elements."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fwpkm_jax.data.recall import Example, Split
from fwpkm_jax.literals import Checked, Count

Group = Literal["parity", "mod3", "mod5", "s3", "s5"]

# Documents of different splits come from different children of the seed.
_STREAMS: dict[Split, int] = {"train": 0, "valid": 1}


def multiplication_table(group: Group) -> np.ndarray:
    """`[order, order]` int32: entry (a, b) is the element "first a, then b"; element 0 is neutral.

    `parity`, `mod3` and `mod5` are addition modulo 2, 3 and 5. `s3`, the permutations of three
    things, is the smallest group in which the order matters. `s5`, those of five, is the smallest
    of its kind that is not solvable: no circuit of constant depth is known to track it.
    """
    if group in ("s3", "s5"):
        elements = list(itertools.permutations(range(int(group[1:]))))
        number = {element: index for index, element in enumerate(elements)}
        rows = [[number[tuple(b[i] for i in a)] for b in elements] for a in elements]
        return np.array(rows, np.int32)
    order = {"parity": 2, "mod3": 3, "mod5": 5}[group]
    element = np.arange(order, dtype=np.int32)
    return (element[:, None] + element) % order


@dataclass(frozen=True, kw_only=True)
class StateTrackingData(Checked):
    """Random elements of a group; each label is the product of all tokens up to it. Needs no files.

    Every label depends on all tokens before it, and a token's effect does not decrease with its
    distance, so a model must carry the state.
    """

    group: Group = "parity"
    """The group, see `multiplication_table`."""
    length: Count = 64
    """Tokens, and labels, per document."""

    @property
    def vocab_size(self) -> int:
        """Number of elements of the group, which are the ids of tokens and labels."""
        return len(multiplication_table(self.group))


class StateTrackingSource:
    """Random access to the documents of one split: each is a function of (seed, index) alone."""

    def __init__(self, config: StateTrackingData, *, split: Split, seed: int):
        self._config = config
        self._table = multiplication_table(config.group)
        self._stream = _STREAMS[split]
        self._seed = seed

    def __getitem__(self, index: int) -> Example:
        """One document.

        Returns:
          `tokens`: int32 `[length]`, elements.
          `labels`: int32 `[length]`, the product of the tokens up to each, itself included.
        """
        rng = np.random.default_rng(
            np.random.SeedSequence(self._seed, spawn_key=(self._stream, index))
        )
        tokens = rng.integers(len(self._table), size=self._config.length, dtype=np.int32)
        product = itertools.accumulate(tokens, lambda a, b: self._table[a, b])
        return {"tokens": tokens, "labels": np.fromiter(product, np.int32, len(tokens))}
