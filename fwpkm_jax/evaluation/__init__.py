"""Evaluations of trained models, by name.

An evaluation is a function `evaluate(subject, options) -> Outcome` with views of its numbers,
registered under a name (`interface`, `registry`). `run_suite` runs them, adds provenance, prints
tables and writes files.
"""

from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.perplexity import PerplexityConfig
from fwpkm_jax.evaluation.recall import RecallConfig
from fwpkm_jax.evaluation.record import Origin, Result, save_result
from fwpkm_jax.evaluation.registry import EVALS, register_evaluation
from fwpkm_jax.evaluation.suite import choose_suite, run_suite

__all__ = [
    "EVALS",
    "Evaluation",
    "NeedleConfig",
    "Origin",
    "Outcome",
    "PerplexityConfig",
    "RecallConfig",
    "Result",
    "Subject",
    "choose_suite",
    "register_evaluation",
    "run_suite",
    "save_result",
]
