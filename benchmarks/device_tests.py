"""The kernels' tests on the device that is here, as one JSON file.

    python benchmarks/device_tests.py --out benchmarks/results/h100/parity.json

Runs `pytest -m "gpu or tpu"`: every kernel, shape, output and VJP against the reference, compiled
for the device. Where there is no such device the tests are skipped, and the file says so.
"""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from machine import environment, write_result


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the tests that are marked for a device."""

    out: Path | None = None
    """File for the JSON; None: print it."""


def main(options: Options) -> int:
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu or tpu", "tests/kernels"]
        command += ["-n", "0", f"--junitxml={report}"]
        # Else the tests' settings would choose the CPU.
        platform = jax.default_backend()
        variables = {**os.environ, "JAX_PLATFORMS": "cpu" if platform == "cpu" else ""}
        run = subprocess.run(command, cwd=root, check=False, env=variables)
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        case.get("name")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    result = {"environment": environment(), **counts, "failed": failed}
    write_result(result, options.out)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
