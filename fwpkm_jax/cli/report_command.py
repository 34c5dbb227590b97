"""`fwpkm report RUN`: writes RUN/results/report.html from the existing results."""

from collections.abc import Sequence
from dataclasses import dataclass

from fwpkm_jax.cli.options import RunArgument, parse_options
from fwpkm_jax.evaluation.report import write_report
from fwpkm_jax.storage.addresses import address_of
from fwpkm_jax.training.runs.mirror import run_folder


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Gathers a run's training curves, tables, plots and provenance in RUN/results/report.html."""

    run: RunArgument
    """Run directory, as `fwpkm train` wrote it."""


def main(arguments: Sequence[str], program: str = "fwpkm report") -> int:
    """Writes the report; returns the program's exit code."""
    options = parse_options(ReportOptions, arguments, program, addresses=("run",))
    with run_folder(options.run) as folder:
        name = write_report(folder).relative_to(folder)
    print(f"wrote {address_of(options.run / name)}")
    return 0
