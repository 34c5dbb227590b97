"""The report of a run: one self-contained page, which `fwpkm report RUN` writes."""

from fwpkm_jax.evaluation.report.page import write_report

__all__ = ["write_report"]
