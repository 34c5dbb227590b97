"""Runs the kernels' tests on this device and writes the outcome as one JSON file.

    python -m benchmarks.kernels.parity --out benchmarks/results/h100/parity.json

Runs `pytest -m "gpu or tpu"`: every kernel, shape, output and VJP against the reference, compiled
for the device. Where there is no such device the tests are skipped, and the file says so. Needs
pytest beside jax; array types are not checked, so beartype may be missing.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import environment, write_result
from benchmarks.options import parse
from benchmarks.processes import ROOT


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the tests that are marked for a device."""

    tests: tuple[str, ...] = ("tests/kernels",)
    """Files or folders of tests, from the repository's root."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def command(tests: Sequence[str], report: Path) -> list[str]:
    """The tests' command line, which needs no plugin of pytest."""
    plain = "--import-mode=importlib --strict-markers -p no:cacheprovider"
    settings = ("-o", f"addopts={plain}", "-o", "filterwarnings=default")
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu or tpu")
    return [*pytest, *settings, *tests, f"--junitxml={report}"]


def counts(report: Path) -> dict[str, Any]:
    """Numbers of tests by outcome, and the names of those that failed, from a JUnit file."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = [
        case.get("name")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    outcomes = ("tests", "failures", "errors", "skipped")
    return {**{name: int(suite.get(name, 0)) for name in outcomes}, "failed": failed}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        variables = {
            **os.environ,
            # Otherwise the tests' settings would choose the CPU.
            "JAX_PLATFORMS": "cpu" if jax.default_backend() == "cpu" else "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        run = subprocess.run(command(options.tests, report), cwd=ROOT, check=False, env=variables)
        found = counts(report) if report.exists() else {"failed": ["no report was written"]}
    write_result({"environment": environment(), **found}, options.out)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
