"""Converts text to token ids and back: bytes, SentencePiece models, `tokenizer.json` files.

All tokenizers follow one convention: no token is added at the start, `encode` adds none at the end,
and text that spells a control token (`</s>`) is encoded as its characters.
"""

import hashlib
import importlib.resources
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from fwpkm_jax.io.untrusted import (
    OutsideFileError,
    is_pointer,
    reading,
    refuse_pointer,
)
from fwpkm_jax.lazy_imports import import_extra
from fwpkm_jax.literals import nearest
from fwpkm_jax.storage.addresses import read_small, scheme_of

BYTES = "bytes"
MISTRAL_V1 = "mistral-v1"
_MOST_MODEL_BYTES = 2**26

# The tokenizer of Mistral-7B-v0.1, which the paper uses; mistral-common ships the same bytes.
_MISTRAL_V1_FILE = "tokenizer.model.v1"
_MISTRAL_V1_SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"


class Tokenizer(Protocol):
    """The interface that data and evaluations need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids run from 0."""
        ...

    @property
    def eos_id(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids with which a generated text ends, `eos_id` among them."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that encode alike: a name, or the SHA-256 of the model file."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[tokens]`, nothing added at either end."""
        ...

    def encode_batch(self, texts: Sequence[str], *, num_threads: int) -> list[np.ndarray]:
        """What `encode` gives for each text, by up to `num_threads` threads at once."""
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids; the end of a document gives no text."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, and one more id, 256, that ends a document.

    The end needs an id of its own because every byte, 0 included, may occur in a text: 257 ids.
    """

    vocab_size = 257
    eos_id = 256
    stop_ids = (256,)
    fingerprint = BYTES

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`, int32 `[bytes]`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int) -> list[np.ndarray]:
        """The bytes of each text; uses no threads."""
        return [self.encode(text) for text in texts]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the bytes; bytes that are not UTF-8 (a cut character) read as U+FFFD."""
        ids = _checked_ids(token_ids, self.vocab_size)
        return ids[ids != self.eos_id].astype(np.uint8).tobytes().decode(errors="replace")


class SentencePieceTokenizer:
    """The raw encoding of a SentencePiece model.

    Hugging Face tokenizers turn `</s>` within a text into the id that ends a document; this one
    does not, so no text can end its document early.
    """

    def __init__(self, model: bytes, *, name: str):
        """Loads a model.

        Raises:
          ImportError: the package sentencepiece is not installed.
          ValueError: it is not a SentencePiece model, or has no piece that ends a document.
        """
        self._name = name
        package = import_extra("sentencepiece", "SentencePiece models are read", extra="tokenizers")
        self._processor = package.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, UnicodeDecodeError) as error:
            problem = "is not a SentencePiece model"
            raise OutsideFileError(name, problem, otherwise="pass a .model file") from error
        self.vocab_size = int(self._processor.vocab_size())
        self.eos_id = int(self._processor.eos_id())
        self.stop_ids = (self.eos_id,)
        self.fingerprint = hashlib.sha256(model).hexdigest()
        if self.eos_id < 0:
            problem = "has no eos piece to end a document"
            raise OutsideFileError(name, problem, otherwise="train one with an eos")

    def encode(self, text: str) -> np.ndarray:
        """Piece ids of `text`, int32 `[pieces]`."""
        return np.asarray(self._processor.encode(text), np.int32)

    def encode_batch(self, texts: Sequence[str], *, num_threads: int) -> list[np.ndarray]:
        """Piece ids of each text; the library's threads share the texts."""
        encoded = self._processor.encode(list(texts), num_threads=num_threads)
        return [np.asarray(ids, np.int32) for ids in encoded]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the pieces; control pieces give no text."""
        ids = _checked_ids(token_ids, self.vocab_size).tolist()
        with reading(self._name, problem="holds pieces that are no text"):
            return self._processor.decode(ids)


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer of a name, of a SentencePiece `.model` file or of a `tokenizer.json`.

    Args:
      name_or_path: "bytes", "mistral-v1" (the paper's, from the extra `tokenizers`), a path, or an
        address in a bucket.

    Raises:
      ValueError: there is no such name or file, the file is not a usable tokenizer, or its bucket
        cannot be asked.
      ImportError: a package that it needs is missing; the extra that has it is named.
    """
    if name_or_path == BYTES:
        return ByteTokenizer()
    if name_or_path == MISTRAL_V1:
        return SentencePieceTokenizer(mistral_v1_model(), name=MISTRAL_V1)
    path = Path(name_or_path).expanduser()
    if scheme_of(name_or_path) is None and not path.is_file():
        names = (BYTES, MISTRAL_V1)
        raise ValueError(
            f"tokenizer={name_or_path!r} is neither one of {', '.join(map(repr, names))} nor an "
            "existing SentencePiece .model file or tokenizer.json "
            f"({path.absolute()}){nearest(name_or_path, names)}."
        )
    place = path if scheme_of(name_or_path) is None else name_or_path
    try:
        if name_or_path.endswith(".json"):
            from fwpkm_jax.data.tokenizer_json import JSONTokenizer

            return JSONTokenizer(place)
        model = read_small(place, most=_MOST_MODEL_BYTES)
    except FileNotFoundError as error:
        raise OutsideFileError(
            name_or_path, "is named as the tokenizer and does not exist", otherwise="put it back"
        ) from error
    if is_pointer(model):
        refuse_pointer(place)
    return SentencePieceTokenizer(model, name=str(place))


def mistral_v1_model() -> bytes:
    """Contents of the paper's tokenizer file, checked.

    Raises:
      ImportError: the package that has it is not installed.
      ValueError: the file is another one.
    """
    try:
        file = importlib.resources.files("mistral_common") / "data" / _MISTRAL_V1_FILE
        model = file.read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(
            f"tokenizer={MISTRAL_V1!r} is read from the package mistral-common, which is not "
            "installed or lacks the file; in a checkout of fwpkm_jax run: "
            "pip install -e '.[tokenizers]'"
        ) from error
    digest = hashlib.sha256(model).hexdigest()
    if digest != _MISTRAL_V1_SHA256:
        raise ValueError(
            f"{file} has SHA-256 {digest}, not {_MISTRAL_V1_SHA256} of the paper's tokenizer; "
            "reinstall mistral-common."
        )
    return model


def _checked_ids(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids if isinstance(token_ids, np.ndarray) else list(token_ids), np.int64)
    if outside := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ValueError(f"token id {outside[0]} is not one of the {vocab_size} ids 0 and up.")
    return ids
