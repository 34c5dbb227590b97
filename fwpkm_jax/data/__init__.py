"""Tokens in, batches out: generated tasks and real text, on Grain.

Grain takes half a second to import, and only making batches needs it: a program that reads a run's
configuration to answer a question does not import it.
"""

from typing import TYPE_CHECKING

from fwpkm_jax.data.contract import AbstractDataConfig, Batch, Batches, Dataset, Source, Split
from fwpkm_jax.data.dataset import make_dataset, vocab_size
from fwpkm_jax.data.needles import (
    NeedleMix,
    needle_question,
    needle_sentence,
    random_key,
    random_value,
)
from fwpkm_jax.data.recall import RecallData
from fwpkm_jax.data.text import Document, TextData, stream_documents
from fwpkm_jax.data.token_files import TokenFile, write_token_file
from fwpkm_jax.data.tokenizers import Tokenizer, load_tokenizer
from fwpkm_jax.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fwpkm_jax.data.batches import BatchDataset, BatchIterator

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

__getattr__, __dir__ = lazy_names(__name__, __file__)
