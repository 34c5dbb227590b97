"""The kernels' checks before first use, side by side: one after another they take minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import carried_verdicts
from pallas_kernels import verdicts
from pallas_kernels.add_rms_norm.api import ADD_RMS_NORM
from pallas_kernels.cross_entropy.api import CROSS_ENTROPY
from pallas_kernels.embed.api import EMBED
from pallas_kernels.gated_delta.api import GATED_DELTA
from pallas_kernels.mix_rms_norm.api import MIX_RMS_NORM
from pallas_kernels.product_top_k.api import CHOOSE
from pallas_kernels.row_ops import VALUE_SCAN
from pallas_kernels.short_convolution.api import SHORT_CONVOLUTION
from pallas_kernels.slot_read.api import SLOT_READ
from pallas_kernels.verdicts import Verdict

CHECKS = {
    operation.name: operation.checked_by
    for operation in (
        *(VALUE_SCAN, GATED_DELTA, CHOOSE, SHORT_CONVOLUTION, SLOT_READ),
        *(ADD_RMS_NORM, MIX_RMS_NORM, EMBED, CROSS_ENTROPY),
    )
}
"""Check of each operation of the models, the longest first."""


def check_side_by_side(
    device_kind: str, run: Callable[..., Verdict] = verdicts.run_apart
) -> dict[str, str | None]:
    """Why each operation's kernel failed on this GPU, None where it agrees.

    Verdicts that are kept here are taken; the others are found, each in a process of its own, and
    kept, so that tracing finds them.
    """

    def of(check: Any) -> str | None:
        found = verdicts.verdict(check, "gpu", device_kind, lambda: run(check, "gpu", device_kind))
        return found.failure

    with ThreadPoolExecutor(len(CHECKS)) as pool:
        return dict(zip(CHECKS, pool.map(of, CHECKS.values()), strict=True))


def prepare(carried: Path | None) -> dict[str, object]:
    """Checks the kernels of this machine's GPU, if it has one; what a line says of it.

    Args:
      carried: file of verdicts from an earlier sitting; None: there is none.
    """
    began = time.monotonic()
    taken = 0 if carried is None else carried_verdicts.take(carried)
    device = jax.devices()[0]
    failures = check_side_by_side(device.device_kind) if device.platform == "gpu" else {}
    seconds = round(time.monotonic() - began, 1)
    return {"taken": taken, "failures": failures, "seconds": seconds}
