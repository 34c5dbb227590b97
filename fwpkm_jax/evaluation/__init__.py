"""Evaluations of trained models, by name."""

from fwpkm_jax.evaluation.interface import Evaluation, Subject
from fwpkm_jax.evaluation.needle import NeedleConfig, needle_accuracy
from fwpkm_jax.evaluation.perplexity import PerplexityConfig, streaming_perplexity
from fwpkm_jax.evaluation.recall import RecallConfig, recall_accuracy
from fwpkm_jax.evaluation.record import Origin, Result, save_result
from fwpkm_jax.evaluation.suite import EVALS, choose_suite, run_suite

__all__ = [
    "EVALS",
    "Evaluation",
    "NeedleConfig",
    "Origin",
    "PerplexityConfig",
    "RecallConfig",
    "Result",
    "Subject",
    "choose_suite",
    "needle_accuracy",
    "recall_accuracy",
    "run_suite",
    "save_result",
    "streaming_perplexity",
]
