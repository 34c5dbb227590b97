"""`fwpkm eval RUN [--suite all] [--step best] [--ppl.FIELD VALUE ...]`.

Prints tables and writes JSON and PNG files into RUN/results, and report.html, which shows and
explains all results of the run so far. Exit codes: 0 done; 2 wrong command line, or an evaluation
does not suit the run.
"""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fwpkm_jax.cli.options import CheckpointOptions, RunArgument, before_others, parse_options
from fwpkm_jax.evaluation import EVALS
from fwpkm_jax.evaluation.readers.fast_weight_dtype import FastWeightDtype
from fwpkm_jax.io.terminal import start_logging
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.run.evaluate import evaluate
from fwpkm_jax.storage.compile_cache import use_compile_cache


@dataclass(frozen=True, kw_only=True)
class EvalOptions(CheckpointOptions):
    """Evaluates a run and writes tables and plots into RUN/results."""

    run: RunArgument
    """Run directory, as `fwpkm train` wrote it."""
    suite: tuple[str, ...] = ()
    """Names of evaluations; the options of each are below. all: every evaluation that suits the
    run's data and has all that it needs. Default: recall or ppl, whichever suits the data."""
    data: tuple[str, ...] = ()
    """Files or folders of text that evaluations of text read, one data set each, in this order and
    without resetting the memory between them. Default: the run's validation text."""
    limit: int | None = None
    """Score at most this many documents, batches or samples; the unit depends on the evaluation."""
    fast_weight_dtype: FastWeightDtype = "float32"
    """Precision of the memory between calls of the model; bfloat16 rounds it after each, as the
    authors' release does."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices that share the reading: sequence, parts of every piece of text."""


def options_type() -> type[EvalOptions]:
    """A subclass of EvalOptions with a section of options for every evaluation in EVALS."""
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


def parse(arguments: Sequence[str], program: str = "fwpkm eval") -> Any:
    """The options that the command line sets, an instance of `options_type()`.

    Raises:
      SystemExit, ValueError: see `parse_options`.
    """
    before_others(arguments)  # Plugins may register evaluations, whose options are then known.
    return parse_options(options_type(), arguments, program, addresses=("run",))


def main(arguments: Sequence[str], program: str = "fwpkm eval") -> int:
    """Runs the evaluations of a command line; returns the program's exit code."""
    start_logging()
    logging.getLogger("fwpkm_jax").setLevel(logging.INFO)
    options = parse(arguments, program)
    configs = {name: getattr(options, name) for name in EVALS}
    use_compile_cache()
    evaluate(
        options.run,
        options.suite,
        step=options.step,
        configs=configs,
        limit=options.limit,
        mesh=options.mesh,
        weights=options.weights,
        data=options.data,
        fast_weight_dtype=options.fast_weight_dtype,
    )
    return 0
