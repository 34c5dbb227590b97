"""A run as one page that explains itself: `fwpkm report RUN` writes it."""

from fwpkm_jax.evaluation.report.page import write_report

__all__ = ["write_report"]
