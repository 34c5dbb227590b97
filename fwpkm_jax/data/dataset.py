"""One call from a data configuration to batches."""

from collections.abc import Sequence

from fwpkm_jax.data.batch import check_batching
from fwpkm_jax.data.contract import AbstractDataConfig, Dataset, Split


def make_dataset(
    config: AbstractDataConfig,
    *,
    split: Split,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | None = None,
) -> Dataset:
    """Batches of a split: without end for "train", one pass in order for "valid", whose last
    batch is filled up with blank examples of weight 0.

    Args:
      config: what the examples are made of.
      split: "train" or "valid".
      batch_size: rows of each batch.
      seed: of the generated documents, or of the order of the rows of text.
      rows: which of each batch's rows to make, in order; None: all. Processes that share a batch
        each make their own, and no row depends on how many of them there are.

    Returns:
      An iterable of dictionaries: `tokens` int32 `[batch, length + 1]`, `loss_weight` float32
      `[batch, length]`, and of the recall task `answer_distance` int32 `[batch, length]`. Its
      iterators have `get_state`, `set_state` and `close`, and go into a checkpoint through
      `grain.checkpoint.CheckpointSave(iterator)`.

    Raises:
      ValueError: an argument is out of range, or the data cannot be read.
    """
    check_batching(batch_size=batch_size, rows=rows)
    if split not in ("train", "valid"):
        raise ValueError(f'split={split!r} is neither "train" nor "valid".')
    return config.make_dataset(split=split, batch_size=batch_size, seed=seed, rows=rows)


def vocab_size(config: AbstractDataConfig) -> int:
    """Number of token ids the data uses."""
    return config.vocab_size
