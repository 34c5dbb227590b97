"""Tokens in, batches out: generated tasks and real text, on Grain."""

from fwpkm_jax.data.base import AbstractDataConfig, Batches, Dataset, Source, Split
from fwpkm_jax.data.batches import Batch, BatchDataset, BatchIterator
from fwpkm_jax.data.dataset import make_dataset, vocab_size
from fwpkm_jax.data.needles import (
    NeedleMix,
    needle_question,
    needle_sentence,
    random_key,
    random_value,
)
from fwpkm_jax.data.packing import cut_rows
from fwpkm_jax.data.recall import RecallData
from fwpkm_jax.data.text import Document, TextData, stream_documents
from fwpkm_jax.data.token_files import TokenFile, write_token_file
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "AbstractDataConfig",
    "Batch",
    "BatchDataset",
    "BatchIterator",
    "Batches",
    "Dataset",
    "Document",
    "NeedleMix",
    "RecallData",
    "Source",
    "Split",
    "TextData",
    "TokenFile",
    "Tokenizer",
    "cut_rows",
    "load_tokenizer",
    "make_dataset",
    "needle_question",
    "needle_sentence",
    "random_key",
    "random_value",
    "stream_documents",
    "vocab_size",
    "write_token_file",
]
