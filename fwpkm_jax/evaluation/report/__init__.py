"""The report of a run: one self-contained page, which `fwpkm report RUN` writes."""

from fwpkm_jax.evaluation.report.page import read_results, write_report

__all__ = ["read_results", "write_report"]
