"""The registry of all evaluations by name, those of other packages included."""

import dataclasses

from fwpkm_jax.evaluation.interface import Evaluation
from fwpkm_jax.lazy_imports import LazyRegistry

_PAPER = "fwpkm_jax.paper.evaluation"
_OURS = {
    "ppl": "fwpkm_jax.evaluation.perplexity:PERPLEXITY",
    "recall": "fwpkm_jax.evaluation.recall:RECALL",
    "needle": "fwpkm_jax.evaluation.needle.needle:NEEDLE",
    "continual": f"{_PAPER}.continual:CONTINUAL",
    "longbench": f"{_PAPER}.longbench:LONGBENCH",
    "lm_eval": "fwpkm_jax.evaluation.harness.benchmarks:HARNESS",
    "gate_map": f"{_PAPER}.gate_map:GATE_MAP",
    "trace": f"{_PAPER}.trace:TRACE",
    "gates": f"{_PAPER}.gates:GATES",
}


EVALS = LazyRegistry(_OURS)
"""Registered evaluations by name, in the order of registration."""

OPTIONS_OF_ALL = (
    *("run", "suite", "data", "step", "weights", "limit", "fast_weight_dtype", "mesh"),
    *("plugins", "all"),
)
"""Names with a meaning of their own on the command line of `fwpkm eval`."""


def register_evaluation(evaluation: Evaluation) -> None:
    """Makes an evaluation known to `fwpkm eval`, to `evaluate` and to reports.

    Its options become a section of the command line: `--NAME.FIELD VALUE`. Call it in your package;
    `fwpkm eval RUN --plugins PACKAGE --suite NAME` imports the package first.

    Args:
      evaluation: its name must be new.

    Raises:
      ValueError: the name is taken or is no identifier, or an option has no default or does not
        exist.

    Example:
      See `examples/own_evaluation`.
    """
    name, config = evaluation.name, evaluation.config
    if not name.isidentifier():
        raise ValueError(f"register_evaluation: the name {name!r} must be an identifier.")
    if name in OPTIONS_OF_ALL:
        raise ValueError(
            f"register_evaluation: {name!r} is an option of fwpkm eval; choose another name."
        )
    known = EVALS.get(name)
    if known is not None and _source(known) != _source(evaluation):
        raise ValueError(
            f"register_evaluation: the name {name!r} is taken by {'.'.join(_source(known))}; "
            "choose another."
        )
    if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
        raise ValueError(f"register_evaluation: config={config!r} of {name!r} is no dataclass.")
    missing = dataclasses.MISSING
    options = {field.name: field for field in dataclasses.fields(config)}
    for field in options.values():
        if field.default is missing and field.default_factory is missing:
            raise ValueError(
                f"register_evaluation: the option {field.name!r} of {name!r} has no default; give "
                "it one."
            )
    if evaluation.limit not in options:
        raise ValueError(
            f"register_evaluation: limit={evaluation.limit!r} of {name!r} is none of its options "
            f"{', '.join(options)}."
        )
    EVALS[name] = evaluation


def _source(evaluation: Evaluation) -> tuple[str, str]:
    """Where an evaluation's function is defined; a module that was loaded twice has the same."""
    return evaluation.evaluate.__module__, evaluation.evaluate.__qualname__
