"""Evaluates a run: `python eval.py RUN [--suite ppl needle] [--step best] [--ppl.FIELD VALUE ...]`.

Prints tables and writes JSON and PNG files into RUN/results. Exit codes: 0 done; 2 wrong command
line, or the run cannot be evaluated like this.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from fwpkm_jax.evaluation import (
    NeedleConfig,
    Origin,
    PerplexityConfig,
    RecallConfig,
    Subject,
    choose_suite,
    run_suite,
)
from fwpkm_jax.run import load_run
from fwpkm_jax.training.checkpoint import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluates a run and writes tables and plots into RUN/results."""

    run: tyro.conf.Positional[Path]
    """Run directory, as train.py wrote it."""
    suite: tuple[str, ...] = ()
    """Evaluations: ppl, recall, needle. Default: recall or ppl, whichever the run's data suit."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""
    limit: int | None = None
    """Score at most this many documents of a data set (ppl), batches (recall), samples (needle)."""
    ppl: PerplexityConfig = field(default_factory=PerplexityConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    needle: NeedleConfig = field(default_factory=NeedleConfig)


def main(arguments: list[str]) -> int:
    """Evaluates as the command line asks; the program's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("fwpkm_jax").setLevel(logging.INFO)
    options = tyro.cli(EvalOptions, args=arguments, prog="eval.py", use_underscores=True)
    configs = {"ppl": options.ppl, "recall": options.recall, "needle": options.needle}
    try:
        run = load_run(options.run, options.step)
        data, training = run.experiment.data, run.experiment.training
        suite = choose_suite(options.suite, data)
        subject = Subject(
            model=run.model,
            memory=run.memory,
            data=data,
            lifetime=training.memory.lifetime,
            groups=training.memory.groups,
            batch_size=training.batch_size,
            seed=run.experiment.seed,
            origin=Origin(
                run=str(options.run), step=run.step, fingerprint=run.experiment.fingerprint
            ),
        )
        directory = options.run / "results"
        run_suite(subject, suite, directory=directory, configs=configs, limit=options.limit)
    except (ValueError, FileNotFoundError, DamagedCheckpointError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
