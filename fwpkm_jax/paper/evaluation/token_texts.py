"""The text that each token of a sequence adds, for showing tokens to people."""

from collections.abc import Sequence

import numpy as np

from fwpkm_jax.data import Tokenizer
from fwpkm_jax.evaluation.readers.prompts import num_shared

END = "\u2039end\u203a"
_CONTEXT = 8  # Earlier tokens that are decoded with a token, for its spaces and split characters.
_BROKEN = "\ufffd"  # Replaces bytes that are not (yet) a character.


def token_texts(tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text that each token adds to the text of the tokens before it.

    A character that consists of several tokens is the text of the last one; the others have an
    empty text, like bytes that are not text. The text of the end-of-document token is `END`.
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
        texts.append(after[num_shared(before, after) :])
    return texts
