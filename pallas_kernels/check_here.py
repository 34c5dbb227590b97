"""The program that `pallas_kernels.verdicts` starts to check a kernel in a separate process.

    python -m pallas_kernels.check_here MODULE FUNCTION KERNEL DEVICE_KIND

Calls `FUNCTION(KERNEL)` of MODULE and prints the verdict as one line of JSON.
"""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.verdicts import Verdict


def checked(check: Callable[[Any], None], kernel: str) -> Verdict:
    """The verdict of a check that runs in this process and outside every trace.

    Inside the check the operation uses the kernel without another check.
    """
    try:
        with dispatch.under_check(kernel):
            check(kernel)
    except Exception as error:  # Any error: the reference can be used instead.
        lasting = "RESOURCE_EXHAUSTED" not in str(error)
        return Verdict(f"{type(error).__name__}: {_one_line(error)}", lasting)
    return Verdict(None)


def _one_line(error: Exception) -> str:
    """The first line of an error's message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def main(argv: Sequence[str]) -> None:
    module, function, kernel, expected_kind = argv
    check = getattr(importlib.import_module(module), function)
    kind = jax.devices()[0].device_kind
    if kind != expected_kind:
        found = Verdict(f"the check's process found a {kind}", lasting=False)
    else:
        found = checked(check, kernel)
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
