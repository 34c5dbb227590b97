"""Makes batches of Grain's data sets; iterators can be saved and resumed at any batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from fwpkm_jax.data.batch import Batch, check_batching
from fwpkm_jax.data.identity import check_same

# Batches of tokens are small and quick to make, so a few prefetched ones hide their cost.
BATCHES_AHEAD = 4


class BatchDataset(grain.IterDataset):
    """Batches whose iterators' positions are Grain's, and say which text they are in.

    Of rows by index it is the number of batches given out: `{"next_index": 28}`. Batches of files
    also have `source`, which identifies the files: `{"next_index": 28, "source": {...}}`.
    """

    def __init__(self, batches: grain.IterDataset, *, source: Mapping[str, Any] | None = None):
        super().__init__()
        self._batches, self._source = batches, source

    def __iter__(self) -> "BatchIterator":
        return BatchIterator(self._batches, source=self._source)


class BatchIterator(grain.DatasetIterator):
    """Iterator of `BatchDataset`; `grain.checkpoint.CheckpointSave` takes it as it is."""

    def __init__(self, batches: grain.IterDataset, *, source: Mapping[str, Any] | None):
        super().__init__()
        self._batches, self._source = batches, source
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        return next(self._started())

    def _started(self) -> grain.DatasetIterator:
        if self._inner is None:
            self._inner = iter(self._batches)
        return self._inner

    def get_state(self) -> dict[str, Any]:
        """The position, and a description of the source, as JSON values."""
        position = dict(self._started().get_state())
        return position if self._source is None else {**position, "source": dict(self._source)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the batch that a state names, with the same batches as in the first pass.

        Raises:
          ValueError: the state is not one of `get_state`, lies beyond the last batch, or was saved
            of other text.
        """
        if not isinstance(state, dict) or not isinstance(state.get("next_index", 0), int):
            raise _no_position(state, "it is no dictionary of JSON values that Grain wrote")
        check_same(state.get("source", {}), self._source or {})
        self.close()
        try:
            self._started().set_state({n: x for n, x in state.items() if n != "source"})
        except (KeyError, TypeError, IndexError) as error:
            raise _no_position(state, f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stops the thread that reads ahead; the next batch starts it again, at the first."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def _no_position(state: Any, reason: str) -> ValueError:
    return ValueError(
        f"{state!r} is not a position in this data ({reason}); pass what get_state returned on "
        "data of the same configuration, in the same versions of Grain and of this package."
    )


class _SomeRows:
    """Some rows of every batch, one example after the other; other rows are not made."""

    def __init__(self, examples: grain.MapDataset, *, batch_size: int, rows: Sequence[int]):
        self._examples, self._batch_size, self._rows = examples, batch_size, tuple(rows)

    def __len__(self) -> int:
        return len(self._examples) // self._batch_size * len(self._rows)

    def __getitem__(self, index: int) -> Any:
        batch, place = divmod(index, len(self._rows))
        return self._examples[batch * self._batch_size + self._rows[place]]


def batch_examples(
    examples: grain.MapDataset,
    *,
    batch_size: int,
    rows: Sequence[int] | None = None,
    source: Mapping[str, Any] | None = None,
) -> BatchDataset:
    """Batches of consecutive examples, or the same rows of each.

    Raises:
      ValueError: `batch_size` is not positive, or `rows` are not some of a batch's, in order.
    """
    check_batching(batch_size=batch_size, rows=rows)
    if rows is not None:
        some = _SomeRows(examples, batch_size=batch_size, rows=rows)
        examples = grain.MapDataset.source(some)
        batch_size = len(rows)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCHES_AHEAD)
    batches = examples.batch(batch_size, drop_remainder=True).to_iter_dataset(options)
    return BatchDataset(batches, source=source)
