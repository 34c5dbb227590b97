"""Audit of what a model's recall rests on: causality, indices, origin, isolation, stability.

`fwpkm audit RUN` runs it, and `fwpkm audit --torch FOLDER` that of a model in PyTorch. In Python
`audit_run`, `audit_model` and `audit_torch` give the lines. A program of any other origin is
checked through an adapter of four functions, see `Program` and `program_lines`, or by the functions
`causality`, `reads_the_token_before`, `apart`, `forgotten`, `covers`, `first_write` and
`origin_lines`.
"""

from fwpkm_jax.audit.asking import covers
from fwpkm_jax.audit.audit import Audit, AuditConfig, audit_model, audit_run
from fwpkm_jax.audit.causality import causality
from fwpkm_jax.audit.in_pytorch import audit_torch
from fwpkm_jax.audit.indices import reads_the_token_before
from fwpkm_jax.audit.isolation import apart, forgotten
from fwpkm_jax.audit.lines import Line, failures
from fwpkm_jax.audit.origin import Answer, headline, origin_lines
from fwpkm_jax.audit.program import Program, program_lines
from fwpkm_jax.audit.stability import first_write

__all__ = [
    "Answer",
    "Audit",
    "AuditConfig",
    "Line",
    "Program",
    "apart",
    "audit_model",
    "audit_run",
    "audit_torch",
    "causality",
    "covers",
    "failures",
    "first_write",
    "forgotten",
    "headline",
    "origin_lines",
    "program_lines",
    "reads_the_token_before",
]
