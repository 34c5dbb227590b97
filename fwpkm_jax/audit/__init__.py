"""Audit of what a model's recall rests on: causality, indices, origin, isolation, stability.

`fwpkm audit RUN` runs it. `audit_run` and `audit_model` give the lines in Python; the functions
`causality`, `reads_the_token_before`, `apart`, `forgotten`, `answers_freely`, `covers`,
`first_write` and `origin_lines` check a model of another program.
"""

from fwpkm_jax.audit.asking import answers_freely, covers
from fwpkm_jax.audit.audit import Audit, AuditConfig, audit_model, audit_run
from fwpkm_jax.audit.causality import causality, look_ahead
from fwpkm_jax.audit.indices import reads_the_token_before
from fwpkm_jax.audit.isolation import apart, forgotten
from fwpkm_jax.audit.lines import Line, failures
from fwpkm_jax.audit.origin import Answer, headline, origin_lines
from fwpkm_jax.audit.stability import first_write

__all__ = [
    "Answer",
    "Audit",
    "AuditConfig",
    "Line",
    "answers_freely",
    "apart",
    "audit_model",
    "audit_run",
    "causality",
    "covers",
    "failures",
    "first_write",
    "forgotten",
    "headline",
    "look_ahead",
    "origin_lines",
    "reads_the_token_before",
]
