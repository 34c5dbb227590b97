"""The kernels' checks before first use, side by side: one after another they take minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from benchmarks import carried_verdicts
from pallas_kernels import row_ops, verdicts
from pallas_kernels.add_rms_norm import specs as add_rms_norm
from pallas_kernels.cross_entropy import specs as cross_entropy
from pallas_kernels.embed import specs as embed
from pallas_kernels.gated_delta import specs as gated_delta
from pallas_kernels.mix_rms_norm import specs as mix_rms_norm
from pallas_kernels.product_top_k import specs as product_top_k
from pallas_kernels.short_convolution import specs as short_convolution
from pallas_kernels.slot_read import specs as slot_read
from pallas_kernels.verdicts import Verdict

CHECKS: dict[str, Callable[..., None]] = {
    "value_scan": row_ops.check,
    "chunk_gated_delta_rule": gated_delta.check,
    "product_top_k": product_top_k.check,
    "short_convolution": short_convolution.check,
    "slot_read": slot_read.check,
    "add_rms_norm": add_rms_norm.check,
    "mix_rms_norm": mix_rms_norm.check,
    "embed": embed.check,
    "cross_entropy": cross_entropy.check,
}
"""Check of each operation of the models, the longest first."""


def check_side_by_side(
    device_kind: str, run: Callable[..., Verdict] = verdicts.run_apart
) -> dict[str, str | None]:
    """Why each operation's kernel failed on this GPU, None where it agrees.

    Verdicts that are kept here are taken; the others are found, each in a process of its own, and
    kept, so that tracing finds them.
    """

    def of(check: Callable[..., None]) -> str | None:
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
