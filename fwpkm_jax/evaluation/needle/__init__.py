"""Needle in a haystack: reads a text n times, then answers a question from memory.

References: Zhao and Jones 2026, arXiv:2601.00671, section 4.3; Figures 4 and 10.
"""

from fwpkm_jax.evaluation.needle.config import NeedleConfig
from fwpkm_jax.evaluation.needle.evaluate import NEEDLE, needle_accuracy
from fwpkm_jax.evaluation.needle.reading import Prompt, answer_each, encode_prompt, open_reader
from fwpkm_jax.evaluation.needle.samples import Needle, NeedleSample, take_samples
from fwpkm_jax.evaluation.needle.scores import score_answers

__all__ = [
    "NEEDLE",
    "Needle",
    "NeedleConfig",
    "NeedleSample",
    "Prompt",
    "answer_each",
    "encode_prompt",
    "needle_accuracy",
    "open_reader",
    "score_answers",
    "take_samples",
]
