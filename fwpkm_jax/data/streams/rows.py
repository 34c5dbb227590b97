"""Rows and batches from files that are read while training; a position is some hundred bytes.

Grain's own datasets mix the sources, shuffle within windows, make batches and read ahead; this
module gives them rows and keeps, with their state, what the text is known by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from fwpkm_jax.data.batch import Batch
from fwpkm_jax.data.batches import BATCHES_AHEAD
from fwpkm_jax.data.documents import Place
from fwpkm_jax.data.identity import check_same
from fwpkm_jax.data.packing import make_row
from fwpkm_jax.data.streams.files import AbstractDataFile
from fwpkm_jax.data.streams.formats import Tokens, read_tokens
from fwpkm_jax.data.tokenizers import Tokenizer
from fwpkm_jax.literals import some


class StreamedTokens(grain.IterDataset):
    """Rows of token ids cut from the concatenation of a source's documents, int32 `[length + 1]`.

    Each epoch reads the files in another order, a function of the seed and the epoch's number.

    Args:
      files: of the source.
      tokenizer: encodes the text.
      field: of a record that holds the text.
      row_length: tokens of a row.
      seed: of the order of the files; None: the given order.
      epochs: None: without end; a short last row is dropped.
    """

    def __init__(
        self,
        files: Sequence[AbstractDataFile],
        tokenizer: Tokenizer,
        *,
        field: str,
        row_length: int,
        seed: int | None,
        epochs: int | None,
    ):
        super().__init__()
        self.files, self.tokenizer, self.field = tuple(files), tokenizer, field
        self.row_length, self.order_seed, self.epochs = row_length, seed, epochs

    def __iter__(self) -> TokensIterator:
        return TokensIterator(self)

    def order(self, epoch: int) -> list[int]:
        """The numbers of the files in the order of an epoch."""
        if self.order_seed is None:
            return list(range(len(self.files)))
        rng = np.random.default_rng((self.order_seed, epoch))
        return rng.permutation(len(self.files)).tolist()


class TokensIterator(grain.DatasetIterator):
    """Iterator of `StreamedTokens`. Its state names the piece with the next token, and the token in
    it."""

    def __init__(self, source: StreamedTokens):
        super().__init__()
        self._source = source
        self._go_to(epoch=0, file=0, place=Place(), used=0)

    def _go_to(self, *, epoch: int, file: int, place: Place, used: int) -> None:
        self._epoch, self._file, self._place, self._used = epoch, file, place, used
        self._skip, self._read_here = used, 0
        self._from_start = (file, place, used) == (0, Place(), 0)
        self._tokens = np.zeros(0, np.int32)
        self._pieces: Iterator[Tokens] | None = None

    def __next__(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        missing = self._source.row_length
        while missing:
            if self._pieces is None or self._used == len(self._tokens):
                self._next_piece()
            part = self._tokens[self._used : self._used + missing]
            self._used += len(part)
            missing -= len(part)
            parts.append(part)
        return np.concatenate(parts)

    def _next_piece(self) -> None:
        """Reads the next piece, in the next file or epoch if it must be."""
        source = self._source
        while True:
            if self._pieces is None:
                if source.epochs is not None and self._epoch >= source.epochs:
                    raise StopIteration
                file = source.files[source.order(self._epoch)[self._file]]
                self._pieces = read_tokens(
                    file, source.tokenizer, field=source.field, start=self._place
                )
            if (piece := next(self._pieces, None)) is not None:
                break
            self._end_file()
        self._place, self._tokens, self._used = piece.place, piece.tokens, self._skip
        self._read_here += len(piece.tokens)
        self._skip = 0

    def _end_file(self) -> None:
        source = self._source
        self._pieces, self._place = None, Place()
        self._tokens, self._used, self._skip = self._tokens[:0], 0, 0
        self._file += 1
        if self._file < len(source.files):
            return
        if self._from_start and self._read_here < source.row_length:
            raise ValueError(
                f"{some([file.name for file in source.files])} holds {self._read_here} tokens, "
                f"less than one row of length + 1 = {source.row_length}; lower length or give more "
                "text."
            )
        self._epoch, self._file, self._from_start, self._read_here = self._epoch + 1, 0, True, 0

    def get_state(self) -> dict[str, Any]:
        """The position: numbers by name."""
        return {
            "epoch": self._epoch,
            "file": self._file,
            "record": self._place.record,
            "byte": self._place.byte,
            "token": self._used,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position; reads nothing yet."""
        self.close()
        self._go_to(
            epoch=state["epoch"],
            file=state["file"],
            place=Place(state["record"], state["byte"]),
            used=state["token"],
        )

    def close(self) -> None:
        """Closes the file that is being read."""
        if self._pieces is not None:
            getattr(self._pieces, "close", lambda: None)()
            self._pieces = None


class StreamedBatches(grain.IterDataset):
    """Batches of streamed rows; their iterators are `Batches`, see `data.base`.

    Args:
      rows: token ids of a row each.
      batch_size: rows of a batch.
      kept: which rows of each batch this process needs; None: all. Every process reads all text:
        which document a row begins with is known only after the text before it was encoded.
      eos_id: rows have segment ids if it is given; see `packing.PackedRows`.
      filled: a last batch with fewer rows is filled up with blank ones; else it is dropped.
      made_of: identifies the text; it goes into every position.
    """

    def __init__(
        self,
        rows: grain.IterDataset,
        *,
        batch_size: int,
        kept: Sequence[int] | None,
        eos_id: int | None,
        filled: bool,
        made_of: Mapping[str, Any],
    ):
        super().__init__()
        self._made_of = made_of
        wanted = list(range(batch_size) if kept is None else kept)

        def join(rows: Sequence[np.ndarray]) -> Batch:
            examples = [
                make_row(rows[place], eos_id=eos_id)
                if place < len(rows)
                else {n: np.zeros_like(x) for n, x in make_row(rows[0], eos_id=eos_id).items()}
                for place in wanted
            ]
            return {name: np.stack([x[name] for x in examples]) for name in examples[0]}

        batches = rows.batch(batch_size, drop_remainder=not filled, batch_fn=join)
        self._batches = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=BATCHES_AHEAD
        )

    def __iter__(self) -> StreamedBatchIterator:
        return StreamedBatchIterator(self._batches, self._made_of)


class StreamedBatchIterator(grain.DatasetIterator):
    """Iterator of `StreamedBatches`."""

    def __init__(self, batches: grain.IterDataset, made_of: Mapping[str, Any]):
        super().__init__()
        self._batches, self._made_of = batches, made_of
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        return next(self._started())

    def _started(self) -> grain.DatasetIterator:
        if self._inner is None:
            self._inner = iter(self._batches)
        return self._inner

    def get_state(self) -> dict[str, Any]:
        """The position, and a description of the source, as JSON values."""
        return {"stream": self._started().get_state(), "source": dict(self._made_of)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the batch that a state names.

        Raises:
          ValueError: the state is not one of `get_state`, or was saved of other text.
        """
        if not isinstance(state, dict) or not isinstance(state.get("stream"), dict):
            raise ValueError(
                f"{state!r} is not a position in text that is read while training; pass what "
                "get_state returned on data of the same configuration."
            )
        check_same(state.get("source", {}), self._made_of)
        self.close()
        try:
            self._started().set_state(state["stream"])
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"The position in the data was saved by another version of Grain or of this "
                f"package ({type(error).__name__}: {error}); go on with that version."
            ) from error

    def close(self) -> None:
        """Stops reading; the next batch starts it again at the first."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def mix(
    sources: Sequence[grain.IterDataset],
    *,
    weights: Sequence[float] | None,
    window: int,
    seed: int,
) -> grain.IterDataset:
    """Rows of all sources in turn, by weight, shuffled within windows of this many rows.

    Args:
      sources: rows without end.
      weights: relative share of rows of each source; None for one source.
      window: 1: not shuffled.
      seed: of the order.
    """
    rows = sources[0]
    if len(sources) > 1:
        assert weights is not None
        rows = grain.IterDataset.mix(list(sources), weights)
    if window > 1:
        rows = grain.experimental.WindowShuffleIterDataset(rows, window_size=window, seed=seed)
    return rows
