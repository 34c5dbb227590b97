"""Several evaluations of one subject, shown and saved as they come."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.data import RecallData, TextData
from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.needle import NEEDLE
from fwpkm_jax.evaluation.perplexity import PERPLEXITY
from fwpkm_jax.evaluation.recall import RECALL
from fwpkm_jax.evaluation.record import Result, save_result

EVALS: dict[str, Evaluation] = {
    "ppl": PERPLEXITY,
    "recall": RECALL,
    "needle": NEEDLE,
}


def choose_suite(names: Sequence[str], data: RecallData | TextData) -> tuple[str, ...]:
    """The evaluations asked for, checked; without names the default ones that suit the data.

    Raises:
      ValueError: a name is unknown (the nearest is given), or does not suit the run's data.
    """
    suiting = [name for name, one in EVALS.items() if isinstance(data, one.data)]
    for name in names:
        if name not in EVALS:
            near = difflib.get_close_matches(name, EVALS, n=1, cutoff=0.0)[0]
            raise ValueError(f"{name!r} is none of {', '.join(EVALS)}; the nearest name is {near}.")
        if name not in suiting:
            raise ValueError(
                f"{name} evaluates runs on {EVALS[name].data.__name__}, this one was trained on "
                f"{type(data).__name__}; choose among {', '.join(suiting)}."
            )
    return tuple(names) or tuple(name for name in suiting if EVALS[name].in_default_suite)


def run_suite(
    subject: Subject,
    suite: Sequence[str],
    *,
    directory: Path,
    configs: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> dict[str, Result]:
    """Evaluates, prints each table and writes JSON, arrays and plots into `directory`.

    Args:
      subject: model, memory and how they were trained.
      suite: names in EVALS, from `choose_suite`.
      directory: of the files; made where it is missing.
      configs: options by name; defaults where a name is missing.
      limit: bounds what each evaluation scores, in its own unit.

    Returns:
      The results by name.
    """
    results = {}
    for name in suite:
        evaluation = EVALS[name]
        config = (configs or {}).get(name, evaluation.config())
        if limit is not None:
            config = dataclasses.replace(config, **{evaluation.limit: limit})
        results[name] = result = evaluation.run(subject, config)
        files = [*save_result(result, directory), *evaluation.plot(result.record, directory)]
        written = "\n".join(f"wrote {path}" for path in files)
        print(f"\n{evaluation.table(result.record)}\n\n{written}", flush=True)
    return results
