"""Cases of bring-up that end in every way a case can."""

import os
import signal
import time
from typing import Any


def work(task: dict[str, Any]) -> dict[str, Any]:
    name = task["case"]
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "raises":
        raise ValueError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")
    from benchmarks.bring_up.cases import outcome  # Loads jax, which the others need not.

    return outcome(case_with({"wrong": 0.3, "right": 1e-7}[name]))


def case_with(error: float) -> Any:
    """A case that measures this error."""
    from benchmarks.bring_up.cases import Case

    measured = {"errors": {"output": 0.0, "d_keys": error}, "milliseconds": 1.0}
    return Case(run=lambda: dict(measured), ratio=1e-5)
