"""Writes RUN/results/report.html: `python -m fwpkm_jax.evaluation.report RUN`."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from fwpkm_jax.command_line import report
from fwpkm_jax.evaluation.report.page import write_report


def main(run: tyro.conf.Positional[Path]) -> int:
    """Gathers a run's training curves, tables, plots and provenance in RUN/results/report.html.

    Args:
      run: Run directory, as train.py wrote it.
    """
    try:
        print(f"wrote {write_report(run)}")
    except (ValueError, FileNotFoundError) as error:
        return report("report", error)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m fwpkm_jax.evaluation.report"))
