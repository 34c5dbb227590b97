"""Runs several evaluations of one subject; prints and saves each result when it is ready."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display.plot_style import drawn
from fwpkm_jax.evaluation.interface import Subject
from fwpkm_jax.evaluation.readers.devices import check_one_stream
from fwpkm_jax.evaluation.record import Result, save_result
from fwpkm_jax.evaluation.registry import EVALS
from fwpkm_jax.io.terminal import visible
from fwpkm_jax.literals import nearest

logger = logging.getLogger(__name__)

DEFAULT = ("ppl", "recall")
"""What runs when no evaluation is named, if it suits the data."""


def choose_suite(
    names: Sequence[str], subject: Subject, configs: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """The names of the evaluations to run, checked.

    Without names, the default evaluations that suit the data are chosen. "all" stands for every
    evaluation that suits the data and has all that it needs; one log line names each evaluation
    that is skipped and what it lacks.

    Args:
      names: names in EVALS, or "all".
      configs: options by evaluation name; a missing name means default options.

    Raises:
      ValueError: a name is unknown (the nearest is given), does not suit the run's data, or is of
        an evaluation that the subject's devices cannot share.
    """
    data = subject.data
    suiting = [name for name, one in EVALS.items() if one.suits(data)]
    for name in names:
        if name not in EVALS and name != "all":
            hint = nearest(name, [*EVALS, "all"])
            raise ValueError(
                f"{name!r} is none of {', '.join([*EVALS, 'all'])}{hint}. Evaluations of other "
                "packages need --plugins PACKAGE (in Python: import it first)."
            )
        if name in EVALS and name not in suiting:
            raise ValueError(
                f"{name} evaluates runs on {EVALS[name].data}, this one was trained on "
                f"{type(data).__name__}; choose among {', '.join(suiting)}."
            )
    if "all" in names:
        options = {name: EVALS[name].config() for name in suiting} | dict(configs or {})
        lacks = {name: EVALS[name].missing(subject, options[name]) for name in suiting}
        for name in filter(lacks.get, lacks):
            logger.warning("skipped %s, which lacks %s", name, lacks[name])
        chosen = tuple(name for name in suiting if not lacks[name])
    else:
        chosen = tuple(names) or tuple(name for name in DEFAULT if name in suiting)
    if subject.text_paths and not any(EVALS[name].data == "text" for name in chosen):
        raise ValueError(
            f"data={', '.join(subject.text_paths)}: {', '.join(chosen)} reads no text; leave it "
            "out."
        )
    for name in chosen:
        if EVALS[name].one_stream:
            check_one_stream(subject.partition, name)
    return chosen


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
      directory: where the files are written; created if it is missing.
      configs: options by evaluation name; a missing name means default options.
      limit: the most that each evaluation scores, in its own unit (see `Evaluation.limit`).
    """
    results = {}
    for name in suite:
        evaluation = EVALS[name]
        config = (configs or {}).get(name, evaluation.config())
        if limit is not None:
            config = dataclasses.replace(config, **{evaluation.limit: limit})
        results[name] = result = evaluation.run(subject, config)
        files = [*save_result(result, directory), *drawn(evaluation.plot, result.record, directory)]
        written = "\n".join(f"wrote {path}" for path in files)
        table = "\n".join(
            filter(None, [evaluation.table(result.record), evaluation.controls_line()])
        )
        print(f"\n{visible(table)}\n\n{written}", flush=True)
    return results
