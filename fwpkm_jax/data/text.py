"""Real text: files and their mixture, as rows for training or documents for evaluation."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fwpkm_jax.data.contract import AbstractDataConfig, Dataset, Source, Split
from fwpkm_jax.data.identity import FILES
from fwpkm_jax.data.needles import Example, NeedleMix
from fwpkm_jax.data.packing import BestFitRows, PackedRows, Packing, TokenSegment
from fwpkm_jax.data.sessions import SessionRows, SessionSource, read_sessions
from fwpkm_jax.data.streams.files import (
    AbstractDataFile,
    LocalFile,
    check_data_path,
    data_files,
    source_identities,
)
from fwpkm_jax.data.streams.formats import read_tokens
from fwpkm_jax.data.streams.names import PACKAGED
from fwpkm_jax.data.token_files import TokenFile, TokenFileEntry, token_dtype
from fwpkm_jax.data.tokenizers import BYTES, Tokenizer, load_tokenizer
from fwpkm_jax.literals import Count, check_fields, some
from fwpkm_jax.storage.addresses import check_store, scheme_of

if TYPE_CHECKING:
    import grain

# Rows of a mixture are shuffled within windows of this many; see `train_rows`.
_MIXTURE_WINDOW = 1024
# Needles use this child of the seed; the order of rows uses the seed itself.
_NEEDLES = 1


Rows = PackedRows | BestFitRows | SessionSource


@dataclass(frozen=True, kw_only=True)
class TextData(AbstractDataConfig):
    """Text from `.jsonl`, `.jsonl.gz`, `.parquet`, `.arrow`, `.txt` or tokenised `.bin` files.

    Every document is followed by the tokenizer's end of document; rows are cut from the
    concatenation of all documents of a source, in the order of sorted files. By default text is
    read and tokenised once at the start and kept in memory, but for tokenised files, of which only
    the needed parts are read. With `reading="stream"` it is read and tokenised while training.

    Example:
      >>> from fwpkm_jax import TextData
      >>> from fwpkm_jax.data import sample, stream_documents
      >>> text = TextData(train_paths=(sample.TRAIN,), valid_paths=(sample.VALID,), length=512)
      >>> next(stream_documents(text, "valid")).id
      'books/fitz-james-o-brien-the-diamond-lens'
    """

    train_paths: tuple[str, ...]
    """Sources of training text, each a file, a folder that is searched to the bottom, an address
    in a bucket (gs://, s3://, memory://), or hf://datasets/OWNER/NAME[@REVISION][/PATTERN]."""
    train_weights: tuple[float, ...] | None = None
    """Relative share of rows from each source; None: in proportion to their sizes. With
    reading=stream, None makes one source of all their files."""
    valid_paths: tuple[str, ...] = ()
    """Sources of validation text, read in this order."""
    reading: Literal["memory", "stream"] = "memory"
    """When text is read. memory: once at the start, and all of it is kept. stream: while training,
    and a window of rows is kept, however much text there is."""
    window: Count = 1024
    """Rows that reading=stream shuffles at a time; resuming reads the window anew. 1: rows come in
    the order of the text."""
    length: Count = 4096
    """Labels per row; a row holds one token more."""
    field: str = "text"
    """Field of a .jsonl, .parquet or .arrow record that holds the text."""
    tokenizer: str = BYTES
    """"bytes", "mistral-v1" (the paper's 32,000 pieces), a SentencePiece .model file, or the
    tokenizer.json of an imported model (extra hf); a file may lie in a bucket."""
    packing: Packing = "concat"
    """How documents come into rows. concat: rows are cut from the concatenation, and a row is read
    as one text. documents: the same rows with segment ids, so that no document sees another.
    best_fit: documents are kept whole where they fit, with padding behind them and segment ids."""
    needles: NeedleMix | None = None
    """Needles hidden in the training rows, of bytes only. None: plain text."""
    sessions: SessionRows | None = None
    """The files hold sessions (`data.sessions`), one a row, instead of texts. None: texts."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("train_paths", "valid_paths"):
            for path in getattr(self, name):
                check_data_path(path, name)
        if scheme_of(self.tokenizer) is not None:
            check_store(self.tokenizer, "tokenizer")
        if not self.train_paths:
            raise ValueError("train_paths=() names no text; give at least one file or folder.")
        if self.reading == "stream":
            self._check_stream()
        if self.needles is not None:
            self._check_needles(self.needles)
        if self.sessions is not None and (self.reading == "stream" or self.needles is not None):
            raise ValueError(
                f"sessions are read into memory and hold no needles; reading={self.reading!r} and "
                f"needles={self.needles} are of texts."
            )
        weights = self.train_weights
        if weights is None:
            return
        if len(weights) != len(self.train_paths):
            raise ValueError(
                f"train_weights={weights} has {len(weights)} entries for "
                f"{len(self.train_paths)} train_paths; give one per path."
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in weights):
            raise ValueError(f"train_weights={weights} must be positive; drop unused paths.")

    @property
    def vocab_size(self) -> int:
        return load_tokenizer(self.tokenizer).vocab_size

    def source(self, *, split: Split, seed: int) -> Source:
        return train_rows(self, seed=seed)[0] if split == "train" else valid_rows(self)

    def make_dataset(
        self, *, split: Split, batch_size: int, seed: int, rows: Sequence[int] | None = None
    ) -> Dataset:
        if self.reading == "stream":
            return _streamed(self, split=split, batch_size=batch_size, seed=seed, rows=rows)
        if split == "valid":
            return super().make_dataset(split=split, batch_size=batch_size, seed=seed, rows=rows)
        from fwpkm_jax.data.batches import batch_examples

        examples, made_of = train_rows(self, seed=seed)
        return batch_examples(examples, batch_size=batch_size, rows=rows, source=made_of)

    @property
    def text(self) -> "TextData":
        return self

    @property
    def about(self) -> str:
        paths = some(self.train_paths)
        return f"text in pieces of {self.length:,} tokens (tokenizer {self.tokenizer}; {paths})"

    @property
    def validates_on(self) -> str:
        said = f"Validation reads {some(self.valid_paths)}"
        ours, theirs = (
            [path.startswith(PACKAGED) for path in paths]
            for paths in (self.valid_paths, self.train_paths)
        )
        if all(ours) and not any(theirs):
            return (
                f"{said}, this package's sample and none of your text; --data.valid_paths names "
                "other text."
            )
        return f"{said}."

    def _check_stream(self) -> None:
        if self.packing == "best_fit":
            raise ValueError(
                "packing='best_fit' needs the lengths of all documents, which reading='stream' "
                "does not know; use packing='documents'."
            )
        if self.needles is not None:
            raise ValueError("needles are hidden in text in memory; use reading='memory'.")

    def _check_needles(self, needles: NeedleMix) -> None:
        if self.packing != "concat":
            raise ValueError(
                f"needles are hidden across documents, which packing={self.packing!r} keeps apart; "
                "use packing='concat'."
            )
        if self.tokenizer != BYTES:
            raise ValueError(
                f"needles are hidden in bytes, tokenizer={self.tokenizer!r}; use {BYTES!r}."
            )
        if self.length < needles.least_length:
            raise ValueError(
                f"length={self.length} cannot hold needles.num_needles={needles.num_needles} "
                f"sentences twice, min_distance={needles.min_distance} apart; raise length to "
                f"{needles.least_length} or lower one of them."
            )


class Document(NamedTuple):
    """A tokenised document."""

    id: str
    """The record's own `id` where it has one, else file name and line or entry."""
    tokens: np.ndarray
    """int32 `[tokens]`, the end of document included."""


def stream_documents(
    config: TextData, split: Split, *, most_tokens: int | None = None
) -> Iterator[Document]:
    """The documents of a split one after the other, in the order of its paths and files.

    Each is read when it is asked for. An entry of a tokenised file counts as a document, whichever
    layout wrote it.

    Args:
      config: names the files.
      split: which of them.
      most_tokens: a document is cut after so many, and the rest of it is not held; None: none is.

    Raises:
      ValueError: the split has no paths, or a file cannot be read as text; the error names it.
      FileNotFoundError: a path does not exist.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    files = [file for path in _paths(config, split) for file in data_files(path)]
    return (document for file in files for document in _read(file, config, tokenizer, most_tokens))


def train_rows(config: TextData, *, seed: int) -> "tuple[grain.MapDataset, dict[str, Any]]":
    """Rows of the training text without end: shuffled anew in every epoch, mixed by weight.

    Needles, where the configuration has any, are a function of (seed, row's number) alone.

    Returns:
      The rows, and what they and the validation text are made of beside the configuration, as
      JSON values: the tokenizer's fingerprint, the tokens of each source, and the content of each
      file.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    sources = [_rows([path], config, tokenizer) for path in config.train_paths]
    made_of = {
        "tokenizer": tokenizer.fingerprint,
        "tokens": [rows.num_tokens for rows in sources],
        FILES: _identities(config),
    }
    rows = _mixture(config, sources, seed=seed)
    needles = config.needles
    if needles is None:
        return rows, made_of

    def hide(index: int, row: Example) -> Example:
        sequence = np.random.SeedSequence(seed, spawn_key=(_NEEDLES, index))
        return needles.hide(row, rng=np.random.default_rng(sequence))

    return rows.map_with_index(hide), made_of


def _identities(config: TextData) -> dict[str, list[list[list[str]]]]:
    """What the text of each source is known by."""
    return {
        "train": [source_identities(data_files(x)) for x in config.train_paths],
        "valid": [source_identities(data_files(x)) for x in config.valid_paths],
    }


def _streamed(
    config: TextData, *, split: Split, batch_size: int, seed: int, rows: Sequence[int] | None
) -> Dataset:
    """Batches of text that is read while training."""
    from fwpkm_jax.data.streams.rows import StreamedTokens, mix, stream_batches

    tokenizer = load_tokenizer(config.tokenizer)
    train = split == "train"
    sources = [data_files(path) for path in _paths(config, split)]
    weights = config.train_weights if train else None
    if weights is None:
        sources = [[file for files in sources for file in files]]
    seeds = np.random.SeedSequence(seed).generate_state(len(sources) + 1).tolist()
    tokens = [
        StreamedTokens(
            files,
            tokenizer,
            field=config.field,
            row_length=config.length + 1,
            seed=order if train else None,
            epochs=None if train else 1,
        )
        for files, order in zip(sources, seeds[1:], strict=True)
    ]
    made_of = {"tokenizer": tokenizer.fingerprint, FILES: _identities(config)} if train else {}
    return stream_batches(
        mix(tokens, weights=weights, window=config.window if train else 1, seed=seeds[0] % 2**31),
        batch_size=batch_size,
        kept=rows,
        eos_id=tokenizer.eos_id if config.packing == "documents" else None,
        filled=not train,
        made_of=made_of,
    )


def _mixture(config: TextData, sources: Sequence[Rows], *, seed: int) -> "grain.MapDataset":
    """Rows of all sources without end."""
    import grain  # Half a second, which a program that only reads the configuration saves.

    seeds = np.random.SeedSequence(seed).generate_state(len(sources) + 1)
    shuffled = [
        grain.MapDataset.source(rows).shuffle(seed=int(order)).repeat()
        for rows, order in zip(sources, seeds[1:], strict=True)
    ]
    if len(shuffled) == 1:
        return shuffled[0]
    weights = config.train_weights or tuple(float(len(rows)) for rows in sources)
    # `mix` takes turns in a fixed pattern: a shard, or a row of the batch with its own memory,
    # could see one source only. Rows are therefore shuffled within windows.
    return grain.experimental.WindowShuffleMapDataset(
        grain.MapDataset.mix(shuffled, weights),
        window_size=_MIXTURE_WINDOW,
        seed=int(seeds[0]) % 2**31,  # Grain adds the window's number and needs 32 bits.
    )


def valid_rows(config: TextData) -> Rows:
    """Rows of the validation text in order."""
    tokenizer = load_tokenizer(config.tokenizer)
    return _rows(_paths(config, "valid"), config, tokenizer)


def _paths(config: TextData, split: Split) -> tuple[str, ...]:
    paths = config.train_paths if split == "train" else config.valid_paths
    if not paths:
        raise ValueError(f"{split}_paths=() names no text; give at least one file or folder.")
    return paths


def _rows(paths: tuple[str, ...] | list[str], config: TextData, tokenizer: Tokenizer) -> Rows:
    files = [file for path in paths for file in data_files(path)]
    if config.sessions is not None:
        sessions = list(read_sessions(files, tokenizer))
        rows: Rows = SessionSource(sessions, config.sessions, length=config.length)
    elif config.packing == "best_fit":
        documents = [document for file in files for document in _documents(file, config, tokenizer)]
        rows = BestFitRows(documents, length=config.length)
    else:
        segments = [_segment(file, config, tokenizer) for file in files]
        eos_id = tokenizer.eos_id if config.packing == "documents" else None
        rows = PackedRows(segments, length=config.length, eos_id=eos_id)
    if not len(rows):
        raise ValueError(
            f"{some(list(map(str, paths)))} holds {rows.num_tokens} tokens, less than one row of "
            f"length + 1 = {config.length + 1}; lower length or give more text."
        )
    return rows


def _documents(
    file: AbstractDataFile, config: TextData, tokenizer: Tokenizer
) -> Iterator[TokenSegment]:
    """The documents of a file, each with two bytes a token if the vocabulary allows."""
    if isinstance(file, LocalFile) and file.kind == ".bin":
        entries = TokenFile(file.path, vocab_size=tokenizer.vocab_size)
        yield from (TokenFileEntry(entries, number) for number in range(entries.num_entries))
        return
    dtype = token_dtype(tokenizer.vocab_size)
    yield from (document.tokens.astype(dtype) for document in _read(file, config, tokenizer))


def _segment(file: AbstractDataFile, config: TextData, tokenizer: Tokenizer) -> TokenSegment:
    """All tokens of a file, with two bytes each if the vocabulary allows."""
    if isinstance(file, LocalFile) and file.kind == ".bin":
        return TokenFile(file.path, vocab_size=tokenizer.vocab_size)
    dtype = token_dtype(tokenizer.vocab_size)
    pieces = [x.tokens.astype(dtype) for x in read_tokens(file, tokenizer, field=config.field)]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def _read(
    file: AbstractDataFile, config: TextData, tokenizer: Tokenizer, most: int | None = None
) -> Iterator[Document]:
    """The documents of a file, each as a whole, or cut after `most` tokens."""
    parts: list[np.ndarray] = []
    held, cut = 0, False
    for piece in read_tokens(file, tokenizer, field=config.field, together=1):
        if not cut:
            parts.append(piece.tokens)
            held += len(piece.tokens)
            cut = most is not None and held >= most
            if cut or piece.ends:
                yield Document(piece.id, np.concatenate(parts)[:most])
                parts, held = [], 0
        cut = cut and not piece.ends
