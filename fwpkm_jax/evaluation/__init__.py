"""Evaluations of trained models, by name.

An evaluation is a function `evaluate(subject, options) -> Outcome` with views of its numbers,
registered under a name (`interface`, `registry`). `run_suite` runs them, adds provenance, prints
tables and writes files.
"""

from fwpkm_jax.evaluation.babilong.evaluate import BABILONG
from fwpkm_jax.evaluation.continual.evaluate import CONTINUAL
from fwpkm_jax.evaluation.dynamic.evaluate import DYNAMIC
from fwpkm_jax.evaluation.gates.gate_map import GATE_MAP
from fwpkm_jax.evaluation.gates.gates import GATES
from fwpkm_jax.evaluation.harness.evaluate import HARNESS
from fwpkm_jax.evaluation.interface import Evaluation, Outcome, Subject
from fwpkm_jax.evaluation.lambada import LAMBADA
from fwpkm_jax.evaluation.longbench.answers import LONGBENCH_ANSWERS
from fwpkm_jax.evaluation.longbench.evaluate import LONGBENCH
from fwpkm_jax.evaluation.needle import NEEDLE, NeedleConfig, needle_accuracy
from fwpkm_jax.evaluation.perplexity import PERPLEXITY, PerplexityConfig, streaming_perplexity
from fwpkm_jax.evaluation.recall import RECALL, RecallConfig, recall_accuracy
from fwpkm_jax.evaluation.record import Origin, Result, save_result
from fwpkm_jax.evaluation.registry import EVALS, register_evaluation
from fwpkm_jax.evaluation.ruler.evaluate import RULER
from fwpkm_jax.evaluation.slot_trace import TRACE
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
    "needle_accuracy",
    "recall_accuracy",
    "register_evaluation",
    "run_suite",
    "save_result",
    "streaming_perplexity",
]

for _evaluation in (
    PERPLEXITY,
    RECALL,
    NEEDLE,
    DYNAMIC,
    CONTINUAL,
    LONGBENCH,
    LONGBENCH_ANSWERS,
    RULER,
    BABILONG,
    LAMBADA,
    HARNESS,
    GATE_MAP,
    TRACE,
    GATES,
):
    register_evaluation(_evaluation)
