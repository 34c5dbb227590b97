"""Texts of two parts as tokens."""

from __future__ import annotations

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
    alone = tokenizer.encode(context)
    shorter = min(len(alone), len(whole))
    differing = np.flatnonzero(alone[:shorter] != whole[:shorter])
    cut = int(differing[0]) if len(differing) else shorter
    return whole[:cut], whole[cut:]
