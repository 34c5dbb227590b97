"""One call from a data configuration to batches."""

from __future__ import annotations

import grain

from fwpkm_jax.data.batches import BatchDataset, PaddedSource, batch_examples, check_batching
from fwpkm_jax.data.recall import RecallData, RecallSource, Split


def make_dataset(
    config: RecallData,
    *,
    split: Split,
    batch_size: int,
    seed: int,
    shard: tuple[int, int] = (0, 1),
) -> BatchDataset:
    """Batches of a split: without end for "train", one pass in order for "valid".

    Args:
      config: what the examples are made of.
      split: "train" or "valid".
      batch_size: rows of each batch, in this shard.
      seed: of the generated documents, or of the order of the rows of text.
      shard: `(index, count)`; every count-th example belongs to a shard. Shards of "valid" have
        the same number of batches, filled up with blank examples of weight 0.

    Returns:
      An iterable of dictionaries: `tokens` int32 `[batch, length + 1]`, `loss_weight` float32
      `[batch, length]`, and of the recall task `answer_distance` int32 `[batch, length]`. Its
      iterators have `get_state`, `set_state` and `close`, and go into a checkpoint through
      `grain.checkpoint.CheckpointSave(iterator)`. With worker processes the calling program needs
      the usual `if __name__ == "__main__":` guard.

    Raises:
      ValueError: an argument is out of range, or the data cannot be read.
    """
    check_batching(batch_size=batch_size, shard=shard)
    if split not in ("train", "valid"):
        raise ValueError(f'split={split!r} is neither "train" nor "valid".')
    source = RecallSource(config, split=split, seed=seed)
    if split == "valid":
        source = PaddedSource(source, multiple=batch_size * shard[1])
    return batch_examples(
        grain.MapDataset.source(source),
        batch_size=batch_size,
        shard=shard,
        num_workers=config.num_workers,
    )


def vocab_size(config: RecallData) -> int:
    """Number of token ids the data uses."""
    return config.vocab_size
