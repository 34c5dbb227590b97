"""What a way to write costs or gives in text: the loss of unseen books while they are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.data import TextData
from fwpkm_jax.evaluation import EVALS, PerplexityConfig
from fwpkm_jax.evaluation.sources import text_sources
from fwpkm_jax.models.language_model import LanguageModel, Memory


def text_losses(
    model: LanguageModel, memory: Memory, data: TextData, path: Path
) -> dict[str, list[Any]]:
    """The mean loss of each document of a file, read as one stream from the first memory.

    Args:
      model: reads, and writes by its rule.
      memory: leaves `[groups, ...]`; the first group starts.
      data: the tokenizer and the length of a segment.
      path: JSON Lines with the documents.

    Returns:
      `losses` in nats and `labels`, by document.
    """
    config = PerplexityConfig(write="on", segment_length=data.length)
    sources = text_sources(replace(data, valid_paths=(str(path),)))
    read = EVALS["ppl"].of_model(model, memory, config=config, sources=sources)
    labels = np.bincount(read.arrays["document"])
    sums = np.bincount(read.arrays["document"], read.arrays["loss_writing"])
    return {"losses": np.round(sums / labels, 5).tolist(), "labels": labels.tolist()}
