"""Variants of bring-up's training step that end in every way a variant can."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

TIMES = {"milliseconds": 10.0, "samples_per_second": 100.0, "final_loss": 1.5, "steps": 3}


def work(task: dict[str, Any]) -> dict[str, Any]:
    del task
    return {"operations": ["value_scan", "new_op", "other_op"]}


def talk(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    variant, model = task["variant"], task["model"]
    if variant["carried"]:
        raise ValueError("INTERNAL: the topology is another one")
    if variant["name"] == "flags":
        os.kill(os.getpid(), signal.SIGSEGV)
    if variant["name"] == "both":
        time.sleep(600)
    print("a library's line, which is no JSON")
    yield {"device": "a device", "reference": os.environ.get("PALLAS_KERNELS_REFERENCE", "")}
    if variant["name"] == "graphs":
        raise MemoryError("RESOURCE_EXHAUSTED")
    yield {**TIMES, "xla_flags": os.environ["XLA_FLAGS"]}
    if model == "dies_in_profile":
        os.kill(os.getpid(), signal.SIGKILL)
    yield {"kernels": [["fusion", 2.0, 0.5]], "launches": 2.0}
    yield {"differing": ["[0].params"] if model == "differs" else []}
