"""Tokens in, batches out: generated tasks and real text, on Grain."""

from fwpkm_jax.data.batches import Batch, BatchDataset, BatchIterator
from fwpkm_jax.data.dataset import make_dataset, vocab_size
from fwpkm_jax.data.recall import RecallData

__all__ = [
    "Batch",
    "BatchDataset",
    "BatchIterator",
    "RecallData",
    "make_dataset",
    "vocab_size",
]
