"""The figures of a study's finished evaluations, as its lines of results hold them."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.evaluation.intervals import clustered_mean

PARTS = 5
"""Parts of an evaluation's samples, in order, of which each has its right answers counted: a memory
that is never reset may answer later samples less well."""


def results_of(directory: Path) -> dict[str, Any]:
    """The figures of a run's finished evaluations, by their names."""
    found = {}
    for path in sorted(directory.glob("study/*/*.json")):
        label, record = path.parent.name, json.loads(path.read_text())
        digest = {
            "ppl": _perplexities,
            "needle": _needle_shares,
            "longbench": _answer_perplexities,
            "continual": _domain_losses,
        }
        if path.stem in digest:
            found[label] = digest[path.stem](record["results"], path)
    return found


def _perplexities(results: dict[str, Any], path: Path) -> dict[str, Any]:
    found = {
        way: round(results[way]["all"]["perplexity"], 5)
        for way in ("writing", "frozen")
        if way in results
    }
    if "difference" in results:
        over = results["difference"]["all"]
        found["difference"] = [over["loss"], *over["interval"]]
        found["difference_over_books"] = _over(path.with_suffix(".npz"), "document")
    return found


def _needle_shares(results: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    del path
    return [
        {
            **{name: run[name] for name in ("words", "readings")},
            **{name: run["exact"][name] for name in ("answers", "accuracy", "interval")},
            "digits": run["digits"],
            "wrong": kinds_of_wrong(run["samples"]),
            "right_by_part": [
                int(np.sum(part))
                for part in np.array_split([one["exact"] for one in run["samples"]], PARTS)
            ],
        }
        for run in results["runs"]
    ]


def kinds_of_wrong(samples: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Wrong answers by where their beginning comes from.

    Of another needle (`another`): at least two digits, and more than of the number asked for. Of
    that number (`began_right`): at least two digits. Two by chance are 1 % for each needle.
    """
    counts = {"another": 0, "began_right": 0, "neither": 0}
    for one in samples:
        if one["exact"]:
            continue
        right = _common(one["answer"], one["expected"])
        other = max((_common(one["answer"], number) for number in one["others"]), default=0)
        if other >= 2 and other > right:
            counts["another"] += 1
        else:
            counts["began_right" if right >= 2 else "neither"] += 1
    return counts


def _common(one: str, two: str) -> int:
    """Characters with which both begin."""
    same = (a == b for a, b in zip(one, two, strict=False))
    return sum(itertools.takewhile(bool, same))


def _domain_losses(results: dict[str, Any], path: Path) -> dict[str, Any]:
    del path
    return {name: results[name] for name in ("loss", "adaptation", "forgetting", "unseen")}


def _answer_perplexities(results: dict[str, Any], path: Path) -> dict[str, Any]:
    """Of LongBench: by task the samples and the perplexities; the difference over all samples."""
    ways = ("writing", "frozen")
    tasks = {
        task: [facts["samples"], *(round(results[way][task]["perplexity"], 4) for way in ways)]
        for task, facts in results["tasks"].items()
    }
    return {"tasks": tasks, "difference": _over(path.with_suffix(".npz"), "task", "sample")}


def _over(path: Path, *columns: str) -> list[float]:
    """Difference of the losses, written minus frozen: mean, interval over groups of `columns`."""
    with np.load(path) as arrays:
        difference = arrays["loss_writing"].astype(np.float64) - arrays["loss_frozen"]
        labels = np.stack([arrays[name] for name in columns])
    _, group = np.unique(labels, axis=1, return_inverse=True)
    mean, interval = clustered_mean(np.bincount(group, difference), np.bincount(group))
    if interval is None:
        raise ValueError(f"{path} has one {columns[-1]}, which gives no interval.")
    return [float(mean), *map(float, interval)]
