"""Documents of modular arithmetic, with and without brackets, as in arXiv:2207.02098.

A document is an expression over the numbers modulo 5 with +, - and *, then an equals sign, at which
its value is the label. Products come before sums. With brackets, every operation has its own. For
training, the parts that an expression is made of can have labels too.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fwpkm_jax.data.recall import Example, Split

MODULUS = 5
TOKENS = (*(str(number) for number in range(MODULUS)), "+", "-", "*", "(", ")", "=")
"""The tokens by their ids."""
_STREAMS: dict[Split, int] = {"train": 0, "valid": 1}
SHORTEST = 3
"""Tokens of the shortest expression: a number, an operator, a number."""


class ArithmeticSource:
    """Random access to the documents of one split: each is a function of (seed, index) alone."""

    def __init__(
        self,
        *,
        brackets: bool,
        length: int,
        split: Split,
        seed: int,
        every_value: bool = False,
    ):
        """Prepares the lengths.

        Args:
          brackets: every operation has its own.
          length: the most tokens of an expression.
          split: documents of training or others.
          seed: another seed gives other documents.
          every_value: more labels. Without brackets at each number, the value of the expression
            that ends there; with brackets at each closing one, the value of what it closes.

        Raises:
          ValueError: no expression is that short.
        """
        self._every_value = every_value
        self._brackets, self._length = brackets, length
        self._stream, self._seed = _STREAMS[split], seed
        step = 4 if brackets else 2
        first = step + 1 if brackets else SHORTEST
        self._lengths = range(first, length + 1, step)
        if not self._lengths:
            raise ValueError(f"length={length} is too short; expressions have {first} or more.")

    def __getitem__(self, index: int) -> Example:
        """One document.

        Returns:
          `tokens`: int32 `[length + 1]`, the expression, an equals sign, padding with more of them.
          `labels`: int32 `[length + 1]`, the value at the first equals sign, 0 elsewhere; with
            `every_value` also at every number or closing bracket.
          `loss_weight`: float32 `[length + 1]`, 1 where a label is, 0 elsewhere.
        """
        rng = np.random.default_rng(
            np.random.SeedSequence(self._seed, spawn_key=(self._stream, index))
        )
        operations = (int(rng.choice(self._lengths)) - 1) // self._lengths.step
        text = bracketed(rng, operations) if self._brackets else chain(rng, operations)
        tokens = np.full(self._length + 1, TOKENS.index("="), np.int32)
        tokens[: len(text)] = [TOKENS.index(one) for one in text]
        labels, weights = np.zeros_like(tokens), np.zeros(len(tokens), np.float32)
        labelled = [(len(text), 0, len(text))]
        if self._every_value:
            labelled += [(end - 1, begin, end) for begin, end in _parts(text)]
        for position, begin, end in labelled:
            labels[position], weights[position] = eval("".join(text[begin:end])) % MODULUS, 1.0
        return {"tokens": tokens, "labels": labels, "loss_weight": weights}


def chain(rng: np.random.Generator, operations: int) -> Sequence[str]:
    """Numbers with operators between them."""
    text = [_number(rng)]
    for _ in range(operations):
        text += [_operator(rng), _number(rng)]
    return text


def bracketed(rng: np.random.Generator, operations: int) -> Sequence[str]:
    """An expression whose operations are in brackets; each split of them is equally likely."""
    if operations == 0:
        return [_number(rng)]
    left = int(rng.integers(operations))
    right = operations - 1 - left
    return ["(", *bracketed(rng, left), _operator(rng), *bracketed(rng, right), ")"]


def _parts(text: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Begin and end of each pair of brackets or, if there is none, of all up to each number."""
    if "(" not in text:
        yield from ((0, end) for end in range(1, len(text) + 1, 2))
    opened = list[int]()
    for place, token in enumerate(text):
        if token == "(":
            opened.append(place)
        elif token == ")":
            yield opened.pop(), place + 1


def _number(rng: np.random.Generator) -> str:
    return TOKENS[rng.integers(MODULUS)]


def _operator(rng: np.random.Generator) -> str:
    return "+-*"[rng.integers(3)]
