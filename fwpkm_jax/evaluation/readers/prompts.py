"""Texts of two parts as tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fwpkm_jax.data import Tokenizer


def encode_parts(
    context: str, question: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of a context and of what follows it.

    Both are encoded as one text, because they are read as one. The context's tokens are those that
    do not depend on the question after it.
    """
    whole = tokenizer.encode(context + question)
    cut = num_shared(tokenizer.encode(context), whole)
    return whole[:cut], whole[cut:]


def num_shared(first: Sequence[Any] | np.ndarray, second: Sequence[Any] | np.ndarray) -> int:
    """How many tokens, or characters, at the start of both are the same."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
