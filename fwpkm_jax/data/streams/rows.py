"""Rows and batches from files that are read while training; a position is some hundred bytes.

Grain's own datasets mix the sources, shuffle within windows, make batches and read ahead; this
module gives them rows.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from fwpkm_jax.data.batch import Batch
from fwpkm_jax.data.batches import BATCHES_AHEAD, BatchDataset
from fwpkm_jax.data.json_lines import START, Place
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

    def __iter__(self) -> "TokensIterator":
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
        self._go_to(epoch=0, file=0, place=START, token=0)

    def _go_to(self, *, epoch: int, file: int, place: Place, token: int) -> None:
        self._epoch, self._file, self._place = epoch, file, place
        self._tokens, self._used, self._skip = np.zeros(0, np.int32), 0, token
        self._pieces = self._read(epoch, file, place)

    def __next__(self) -> np.ndarray:
        parts: list[np.ndarray] = []
        missing = self._source.row_length
        while missing:
            if self._used == len(self._tokens):
                self._epoch, self._file, piece = next(self._pieces)
                self._place, self._tokens = piece.place, piece.tokens
                self._used, self._skip = self._skip, 0
            part = self._tokens[self._used : self._used + missing]
            self._used += len(part)
            missing -= len(part)
            parts.append(part)
        return np.concatenate(parts)

    def _read(self, epoch: int, file: int, place: Place) -> Generator[tuple[int, int, Tokens]]:
        """The pieces from a place on, with the numbers of epoch and of the file in its order."""
        source, from_start = self._source, (file, place) == (0, START)
        while source.epochs is None or epoch < source.epochs:
            order, num_tokens = source.order(epoch), 0
            for number in range(file, len(order)):
                one = source.files[order[number]]
                for piece in read_tokens(one, source.tokenizer, field=source.field, start=place):
                    num_tokens += len(piece.tokens)
                    yield epoch, number, piece
                place = START
            if from_start and num_tokens < source.row_length:
                raise ValueError(
                    f"{some([x.name for x in source.files])} holds {num_tokens} tokens, less than "
                    f"one row of length + 1 = {source.row_length}; lower length or give more text."
                )
            epoch, file, from_start = epoch + 1, 0, True

    def get_state(self) -> dict[str, Any]:
        """The position: numbers by name."""
        return {
            "epoch": self._epoch,
            "file": self._file,
            "record": self._place.record,
            "byte": self._place.byte,
            "token": self._used + self._skip,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the position; reads nothing yet."""
        self.close()
        place = Place(state["record"], state["byte"])
        self._go_to(epoch=state["epoch"], file=state["file"], place=place, token=state["token"])

    def close(self) -> None:
        """Closes the file that is being read."""
        self._pieces.close()


def stream_batches(
    rows: grain.IterDataset,
    *,
    batch_size: int,
    kept: Sequence[int] | None,
    eos_id: int | None,
    filled: bool,
    made_of: Mapping[str, Any],
) -> BatchDataset:
    """Batches of streamed rows.

    Args:
      rows: token ids of a row each.
      kept: which rows of each batch this process needs; None: all. Every process reads all text:
        which document a row begins with is known only after the text before it was encoded.
      eos_id: rows have segment ids if it is given; see `packing.PackedRows`.
      filled: a last batch with fewer rows is filled up with blank ones; else it is dropped.
      made_of: identifies the text; it goes into every position.
    """
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
    ahead = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=BATCHES_AHEAD
    )
    return BatchDataset(ahead, source=made_of)


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
