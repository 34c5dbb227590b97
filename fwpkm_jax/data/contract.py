"""The contract of a data source: what training, validation and evaluation need of one."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from fwpkm_jax.data.batch import Batch, Example

Split = Literal["train", "valid"]


class Batches(Protocol):
    """An iterator over batches whose position can be saved and restored."""

    def __next__(self) -> Batch:
        """`tokens` int32 `[batch, length + 1]` and `loss_weight` float32 `[batch, length]`.

        Rows of several documents also have `segment_ids` int32 `[batch, length]`, of the inputs: 0
        marks padding, and no run of equal ids sees another.
        """
        ...

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON values; it goes into every checkpoint."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a position that `get_state` gave."""
        ...

    def close(self) -> None:
        """Stops threads and processes."""
        ...


class Source(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> Any:
        """A row: `tokens` int32 `[length + 1]` and `loss_weight` float32 `[length]`.

        With `segment_ids` int32 `[length]` where it holds several documents.
        """
        ...


class Dataset(Protocol):
    """What a data source makes for one split; `BatchDataset` is ours."""

    def __iter__(self) -> Any:
        """New `Batches`, from the first."""
        ...


@dataclass(frozen=True, kw_only=True)
class AbstractDataConfig(abc.ABC):
    """The configuration of a data source: hashable, and written to a run's `config.json`.

    A source of your own is a frozen dataclass below this class; an experiment names it as its
    `data`.
    """

    length: int
    """Labels per row; a row holds one token more."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids the data uses."""

    @abc.abstractmethod
    def source(self, *, split: Split, seed: int) -> Source:
        """The rows of a split by index; those of "train" must last for the whole run.

        Args:
          split: "train" or "valid".
          seed: of everything drawn; a row is a function of it and the index alone.
        """

    def make_dataset(
        self, *, split: Split, batch_size: int, seed: int, rows: Sequence[int] | None = None
    ) -> Dataset:
        """Batches of a split; those of "valid" end with blank rows whose `loss_weight` is 0.

        A model is trained on `tokens[:, :-1]` with the labels `tokens[:, 1:]`. Override this for
        batches that are not made of rows by index, or that Grain's worker processes are to make.

        Args:
          split: "train" or "valid".
          batch_size: rows of each batch.
          seed: of everything drawn.
          rows: which of each batch's rows to make, in order; None: all. Processes that share a
            batch each make their own, and no row depends on how many of them there are.
        """
        import grain  # Half a second, which a program that only reads the configuration saves.

        from fwpkm_jax.data.batches import batch_examples

        source = self.source(split=split, seed=seed)
        if split == "valid":
            source = PaddedSource(source, multiple=batch_size)
        return batch_examples(
            grain.MapDataset.source(source),
            batch_size=batch_size,
            rows=rows,
        )

    @property
    def text(self) -> Any:
        """The `TextData` that evaluations of documents read; None for data that are not text."""
        return None

    @property
    def num_answers(self) -> int | None:
        """How many answers a question may have, for data that ask; None for data that do not.

        Batches of such data hold `answer_distance` int32 `[batch, length]`: at each label that is
        an answer, how many tokens ago it was stated; 0 elsewhere.
        """
        return None

    @property
    def validates_on(self) -> str | None:
        """What a run says of its validation data before it trains; None: nothing."""
        return None

    @property
    def about(self) -> str:
        """What a report says the rows are."""
        return f"{type(self).__name__}, rows of {self.length:,} tokens"


class PaddedSource:
    """Examples padded with blank ones to whole batches.

    A blank example is all zeros. Its `loss_weight` is zero too, so no loss counts it.
    """

    def __init__(self, source: Any, *, multiple: int):
        self._source = source
        self._length = -(-len(source) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Example:
        if index < len(self._source):
            return self._source[index]
        return {name: np.zeros_like(array) for name, array in self._source[0].items()}
