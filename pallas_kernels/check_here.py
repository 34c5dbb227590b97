"""The program that `pallas_kernels.verdicts` starts to check a kernel in a separate process.

    python -m pallas_kernels.check_here MODULE:NAME KERNEL DEVICE_KIND

Calls `NAME(KERNEL)` of MODULE and prints the verdict as one line of JSON.
"""

import importlib
import json
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.verdicts import Verdict


def checked(check: str | Callable[[Any], None], kernel: str) -> Verdict:
    """The verdict of a check that runs in this process and outside every trace.

    Inside the check the operation uses the kernel without another check.
    """
    run: Any = check
    if isinstance(check, str):
        module, name = check.split(":")
        run = operator.attrgetter(name)(importlib.import_module(module))
    try:
        with dispatch.under_check(kernel):
            run(kernel)
    except Exception as error:  # Any error: the reference can be used instead.
        lasting = "RESOURCE_EXHAUSTED" not in str(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Verdict(f"{type(error).__name__}: {lines[0] if lines else ''}", lasting)
    return Verdict(None)


def main(argv: Sequence[str]) -> None:
    check, kernel, expected_kind = argv
    kind = jax.devices()[0].device_kind
    if kind != expected_kind:
        found = Verdict(f"the check's process found a {kind}", lasting=False)
    else:
        found = checked(check, kernel)
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
