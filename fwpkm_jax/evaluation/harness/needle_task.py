"""Documents of the task `fwpkm_needles`, generated without a connection."""

import importlib
import itertools
from typing import Any

from fwpkm_jax.data import TextData, load_tokenizer
from fwpkm_jax.data.sample import TRAIN
from fwpkm_jax.evaluation.needle.samples import SampleSettings, build_samples
from fwpkm_jax.evaluation.sources import text_sources, texts_of


def samples(
    *, words: int = 1000, samples: int = 100, seed: int = 0, **metadata: Any
) -> dict[str, Any]:
    """Haystacks, questions and answers as the harness takes them, by split.

    Args:
      samples: number of haystacks; fewer if the books are too short.
      seed: of keys, numbers and places.
      **metadata: what other tasks are told.
    """
    datasets = importlib.import_module("datasets")  # The harness', which calls this.
    books = text_sources(TextData(train_paths=(TRAIN,), valid_paths=(TRAIN,), tokenizer="bytes"))
    texts = texts_of(books, load_tokenizer("bytes"))
    built = build_samples(texts, SampleSettings(), words=words, seed=seed)
    fields = ("haystack", "question", "answer")
    rows = [{f: getattr(one, f) for f in fields} for one in itertools.islice(built, samples)]
    return {"test": datasets.Dataset.from_list(rows)}
