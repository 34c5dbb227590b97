"""The text that each token of a sequence adds, for showing tokens to people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fwpkm_jax.data import Tokenizer

END = "\u2039end\u203a"
_CONTEXT = 8  # Tokens before that decide what one adds: a space, the end of a character.
_BROKEN = "\ufffd"  # Stands for bytes that are no character, or not yet.


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray) -> list[str]:
    """What each token adds to the text of those before it.

    A character of several tokens belongs to its last one; the others add nothing, nor do bytes that
    are no text. The end of a document reads as `END`.
    """
    ids = [int(token) for token in token_ids]
    texts = []
    for index, token in enumerate(ids):
        if token == tokenizer.eos_id:
            texts.append(END)
            continue
        first = max(0, index - _CONTEXT)
        before = tokenizer.decode(ids[first:index]).rstrip(_BROKEN)
        after = tokenizer.decode(ids[first : index + 1]).rstrip(_BROKEN)
        texts.append(after[_num_shared(before, after) :])
    return texts


def _num_shared(first: str, second: str) -> int:
    """Characters that both texts start with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
