"""Evaluates a run: `python eval.py RUN [--suite all] [--step best] [--ppl.FIELD VALUE ...]`.

Prints tables and writes JSON and PNG files into RUN/results, and report.html, which shows and
explains all results of the run so far. Exit codes: 0 done; 2 wrong command line, or the run cannot
be evaluated like this.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from fwpkm_jax.command_line import check_options, report, separate_options
from fwpkm_jax.evaluation import EVALS, Origin, Subject, choose_suite, run_suite
from fwpkm_jax.evaluation.report import write_report
from fwpkm_jax.run import Run, load_run
from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Evaluates a run and writes tables and plots into RUN/results."""

    run: tyro.conf.Positional[Path]
    """Run directory, as train.py wrote it."""
    suite: tuple[str, ...] = ()
    """Evaluations by name; each has its own options below. all: every one that suits the run's data
    and lacks nothing. Default: recall or ppl, whichever the data suit."""
    step: int | Literal["best"] | None = None
    """Checkpoint: a step, the best by validation loss, or None for the newest."""
    limit: int | None = None
    """Score at most this many documents, batches, samples, whatever each evaluation counts."""


def options_type() -> type[EvalOptions]:
    """EvalOptions with a section for every evaluation in EVALS."""
    sections = [
        (name, one.config, field(default_factory=one.config)) for name, one in EVALS.items()
    ]
    return dataclasses.make_dataclass(
        "EvalOptions",
        sections,
        bases=(EvalOptions,),
        namespace={"__doc__": EvalOptions.__doc__},
        frozen=True,
        kw_only=True,
    )


def parse(arguments: list[str]) -> Any:
    """The command line as an `options_type()`.

    Raises:
      SystemExit: 0 after `--help`; 2, with a message, for a wrong type or a refused value.
      ValueError: an option does not exist; the nearest name is given.
    """
    arguments = separate_options(arguments)
    options = options_type()
    check_options(arguments, options(run=Path()))
    return tyro.cli(
        options,
        args=arguments,
        prog="eval.py",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )


def subject_of(run: Run, *, name: str) -> Subject:
    """What is evaluated of a run; `name` is what the record calls it."""
    experiment, training = run.experiment, run.experiment.training
    return Subject(
        model=run.model,
        memory=run.memory,
        data=experiment.data,
        lifetime=training.memory.lifetime,
        groups=training.memory.groups,
        batch_size=training.batch_size,
        seed=experiment.seed,
        origin=Origin(run=name, step=run.step, fingerprint=experiment.fingerprint),
    )


def main(arguments: list[str]) -> int:
    """Evaluates as the command line asks; the program's exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("fwpkm_jax").setLevel(logging.INFO)
    try:
        options = parse(arguments)
        configs = {name: getattr(options, name) for name in EVALS}
        subject = subject_of(load_run(options.run, options.step), name=str(options.run))
        suite = choose_suite(options.suite, subject, configs)
        directory = options.run / "results"
        run_suite(subject, suite, directory=directory, configs=configs, limit=options.limit)
        print(f"wrote {write_report(options.run)}")
    except (ValueError, FileNotFoundError) as error:
        return report("eval.py", error)
    except DamagedCheckpointError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
