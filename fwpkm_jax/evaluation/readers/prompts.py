"""Texts of two parts as tokens."""

from __future__ import annotations

from collections.abc import Sequence

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


def num_shared(first: Sequence[int] | np.ndarray, second: Sequence[int] | np.ndarray) -> int:
    """How many tokens at the start of both are the same."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first)[:shorter] != np.asarray(second)[:shorter])
    return int(differing[0]) if len(differing) else shorter
