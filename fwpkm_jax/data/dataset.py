"""One call from a data configuration to batches."""

from __future__ import annotations

from collections.abc import Sequence

import grain

from fwpkm_jax.data.batches import BatchDataset, PaddedSource, batch_examples, check_batching
from fwpkm_jax.data.packing import PackedRows
from fwpkm_jax.data.recall import RecallData, RecallSource, Split
from fwpkm_jax.data.text import TextData, train_rows, valid_rows
from fwpkm_jax.data.tokenizers import load_tokenizer


def make_dataset(
    config: RecallData | TextData,
    *,
    split: Split,
    batch_size: int,
    seed: int,
    rows: Sequence[int] | None = None,
) -> BatchDataset:
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
      `grain.checkpoint.CheckpointSave(iterator)`. With worker processes the calling program needs
      the usual `if __name__ == "__main__":` guard.

    Raises:
      ValueError: an argument is out of range, or the data cannot be read.
    """
    check_batching(batch_size=batch_size, rows=rows)
    if split not in ("train", "valid"):
        raise ValueError(f'split={split!r} is neither "train" nor "valid".')
    source = None
    if split == "valid":
        valid = _valid_source(config, seed=seed)
        examples = grain.MapDataset.source(PaddedSource(valid, multiple=batch_size))
    elif isinstance(config, RecallData):
        examples = grain.MapDataset.source(RecallSource(config, split="train", seed=seed))
    else:
        examples, source = train_rows(config, seed=seed)
    return batch_examples(
        examples, batch_size=batch_size, rows=rows, num_workers=config.num_workers, source=source
    )


def vocab_size(config: RecallData | TextData) -> int:
    """Number of token ids the data uses."""
    if isinstance(config, RecallData):
        return config.vocab_size
    return load_tokenizer(config.tokenizer).vocab_size


def _valid_source(config: RecallData | TextData, *, seed: int) -> RecallSource | PackedRows:
    if isinstance(config, RecallData):
        return RecallSource(config, split="valid", seed=seed)
    return valid_rows(config)
