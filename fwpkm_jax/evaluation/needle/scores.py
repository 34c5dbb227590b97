"""Scores of decoded answers: exact, digit and candidate match, overall and by depth."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fwpkm_jax.evaluation.intervals import share
from fwpkm_jax.evaluation.needle.samples import NeedleSample

DEPTH_BINS = 10


def score_answers(samples: Sequence[NeedleSample], answers: Sequence[str]) -> dict[str, Any]:
    """How well the answers match the expected numbers.

    Returns:
      `exact`: share of answers that equal the expected number after surrounding spaces are removed;
      `digits`: mean number of characters that are correct at their position; `candidate`: share of
      answers that equal the number of any needle of the sample; `by_depth`: exact match by the
      tenth of the haystack that contains the target; `progress`: exact matches among the first 1,
      2, ... samples; `samples`: a record of each answer, with the numbers of the `others`.
    """
    records = []
    for sample, answer in zip(samples, answers, strict=True):
        digits = sum(a == b for a, b in zip(answer, sample.answer, strict=False))
        records.append(
            {
                "answer": answer,
                "expected": sample.answer,
                "exact": answer.strip() == sample.answer,
                "digits": digits,
                "candidate": answer in [needle.value for needle in sample.needles],
                "others": [n.value for i, n in enumerate(sample.needles) if i != sample.target],
                "depth": sample.depth,
                "words": sample.words,
                "document": sample.document,
            }
        )
    by_depth = []
    for bin_index in range(DEPTH_BINS):
        inside = [r for r in records if depth_bin(r["depth"]) == bin_index]
        if inside:
            low, high = (100 * (bin_index + side) / DEPTH_BINS for side in (0, 1))
            by_depth.append({"from": low, "to": high, **_share(inside, "exact")})
    return {
        "exact": _share(records, "exact"),
        "digits": float(np.mean([r["digits"] for r in records])),
        "candidate": _share(records, "candidate"),
        "by_depth": by_depth,
        "progress": np.cumsum([r["exact"] for r in records]).tolist(),
        "samples": records,
    }


def depth_bin(depth: float) -> int:
    """Which tenth of the haystack a depth in percent lies in."""
    return min(int(depth / 100 * DEPTH_BINS), DEPTH_BINS - 1)


def _share(records: Sequence[dict[str, Any]], field: str) -> dict[str, Any]:
    return share(sum(record[field] for record in records), len(records))
