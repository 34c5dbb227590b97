"""Makes batches from indexed examples; iterators can be saved and resumed at any batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from fwpkm_jax.data.batch import Batch, check_batching
from fwpkm_jax.data.identity import check_same

# Batches of tokens are small and quick to make, so a few prefetched ones hide their cost.
BATCHES_AHEAD = 4


class BatchDataset(grain.IterDataset):
    """Batches of a map dataset in order; an iterator's position is one integer.

    It is the number of batches given out: `{"next_index": 28}`. Batches of files also have
    `source`, which identifies the files: `{"next_index": 28, "source": {...}}`.
    """

    def __init__(self, batches: grain.MapDataset, *, source: Mapping[str, Any] | None):
        super().__init__(batches)
        self._batches, self._source = batches, source

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self._batches, source=self._source)


class BatchIterator(grain.DatasetIterator):
    """Iterator of `BatchDataset`; `grain.checkpoint.CheckpointSave` takes it as it is."""

    def __init__(self, batches: grain.MapDataset, *, source: Mapping[str, Any] | None):
        super().__init__()
        self._batches, self._source = batches, source
        self._next_index = 0
        self._inner: grain.DatasetIterator | None = None

    def __next__(self) -> Batch:
        if self._inner is None:
            rest = self._batches[self._next_index :]
            options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCHES_AHEAD)
            self._inner = iter(rest.to_iter_dataset(options))
        batch = next(self._inner)
        self._next_index += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Number of batches given out so far and a description of their source, as JSON values."""
        position = {"next_index": self._next_index}
        return position if self._source is None else {**position, "source": dict(self._source)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at the batch that a state names, with the same batches as in the first pass.

        Raises:
          ValueError: the state is not one of `get_state`, lies beyond the last batch, or was saved
            of other files.
        """
        next_index = state.get("next_index") if isinstance(state, dict) else None
        if not isinstance(next_index, int) or not 0 <= next_index <= len(self._batches):
            raise ValueError(
                f"{state!r} is not a position in this data of {len(self._batches)} batches; pass "
                "what get_state returned on data of the same configuration."
            )
        check_same(state.get("source", {}), self._source or {})
        self.close()
        self._next_index = next_index

    def close(self) -> None:
        """Stops the thread that reads ahead; the next batch starts it again."""
        if self._inner is not None:
            self._inner.close()
            self._inner = None


class BatchRows(grain.MapDataset):
    """Some rows of every batch, one example after the other; other rows are not made."""

    def __init__(self, examples: grain.MapDataset, *, batch_size: int, rows: Sequence[int]):
        super().__init__(examples)
        self._examples = examples
        self._batch_size = batch_size
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._examples) // self._batch_size * len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
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
        examples = BatchRows(examples, batch_size=batch_size, rows=rows)
        batch_size = len(rows)
    batches = examples.batch(batch_size, drop_remainder=True)
    return BatchDataset(batches, source=source)
