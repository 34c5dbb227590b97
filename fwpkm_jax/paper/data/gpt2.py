"""Decodes GPT-2's token ids to text, which needs only the vocabulary.

References: Radford et al. 2019; the file is OpenAI's `encoder.json`, SHA-256
196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from fwpkm_jax.io.untrusted import parse_json, read_bytes

WANTED = (
    "openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json, or vocab.json of "
    "huggingface.co/openai-community/gpt2"
)
VOCAB_SIZE = 50_257
EOS_ID = 50_256

_EOS = "<|endoftext|>"


class Gpt2Decoder:
    """Decodes GPT-2's ids."""

    def __init__(self, path: str | Path):
        """Loads a vocabulary, which maps pieces to ids.

        Raises:
          FileNotFoundError: there is no file.
          ValueError: it is not GPT-2's.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"There is no {path.absolute()}; download {WANTED}.")
        content = read_bytes(path, most=2**23, otherwise=f"download {WANTED}")
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            pieces = parse_json(content, path)
            ids = {int(token_id): _piece_bytes(piece) for piece, token_id in pieces.items()}
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} maps no pieces to ids; download {WANTED}.") from error
        if sorted(ids) != list(range(VOCAB_SIZE)) or pieces.get(_EOS) != EOS_ID:
            raise ValueError(
                f"{path} is not GPT-2's vocabulary of the ids 0 to {EOS_ID}, the last of them "
                f"{_EOS}; download {WANTED}."
            )
        self._pieces = [ids[token_id] for token_id in range(VOCAB_SIZE)]

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of ids `[tokens]`; bytes that are not UTF-8, as of a cut character, as U+FFFD.

        Raises:
          ValueError: an id is not GPT-2's.
        """
        if token_ids.size and token_ids.max() >= VOCAB_SIZE:
            raise ValueError(
                f"token id {token_ids.max()} is not one of GPT-2's {VOCAB_SIZE}; the data are "
                "damaged or of another tokenizer."
            )
        pieces = self._pieces
        return b"".join(pieces[token_id] for token_id in token_ids.tolist()).decode(
            errors="replace"
        )


def _byte_symbols() -> dict[str, int]:
    """The character that stands for each byte in a piece: itself where it prints, else one above.

    The bytes that do not print, in order, are the characters from U+0100 on.
    """
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


_SYMBOLS = _byte_symbols()


def _piece_bytes(piece: str) -> bytes:
    return bytes(_SYMBOLS[symbol] for symbol in piece)
