"""The program that `pallas_kernels.verdicts` starts to check a kernel in a separate process.

    python -m pallas_kernels.check_here MODULE FUNCTION KERNEL DEVICE_KIND

Calls `FUNCTION(KERNEL)` of MODULE and prints the verdict as one line of JSON.
"""

import importlib
import json
import sys
from collections.abc import Sequence

import jax

from pallas_kernels import dispatch
from pallas_kernels.verdicts import Verdict


def main(argv: Sequence[str]) -> None:
    module, function, kernel, expected_kind = argv
    check = getattr(importlib.import_module(module), function)
    kind = jax.devices()[0].device_kind
    if kind != expected_kind:
        found = Verdict(f"the check's process found a {kind}", lasting=False)
    else:
        found = dispatch.checked_here(check, kernel)  # pyright: ignore[reportArgumentType]
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
