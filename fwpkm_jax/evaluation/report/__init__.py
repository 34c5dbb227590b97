"""A run as one page that explains itself: `python -m fwpkm_jax.evaluation.report RUN`."""

from fwpkm_jax.evaluation.report.page import write_report

__all__ = ["write_report"]
