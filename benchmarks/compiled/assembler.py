"""Reads what the H100's assembler says of Mosaic GPU kernels: registers and spilled bytes."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

_KERNEL = re.compile(
    r"properties for (\w+)_mosaic_gpu_kernel\n"
    r".* (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers"
)
_REPORT = "MOSAIC_GPU_DUMP_PTXAS"
"""Variable that makes JAX print what the assembler says of each kernel."""


def assembled(traced: Any) -> dict[str, dict[str, int]]:
    """Compiles a traced function and returns the assembler's report of each of its kernels.

    The assembler says nothing about a program that this process compiled before.
    """
    return compiled_and_report(traced)[1]


def compiled_and_report(traced: Any) -> tuple[Any, dict[str, dict[str, int]]]:
    """The compiled function besides, for the device of its arguments."""
    # The assembler writes to the process's own output, not to Python's.
    with tempfile.TemporaryFile("w+") as file:
        with mock.patch.dict(os.environ, {_REPORT: "1"}), _into(file.fileno()):
            compiled = traced.lower().compile()
        file.seek(0)
        return compiled, reported(file.read())


def reported(text: str) -> dict[str, dict[str, int]]:
    """Registers and spilled bytes by the name of the kernel."""
    return {
        found[1]: {
            "registers": int(found["registers"]),
            "spill_store_bytes": int(found["stores"]),
            "spill_load_bytes": int(found["loads"]),
        }
        for found in _KERNEL.finditer(text)
    }


@contextlib.contextmanager
def _into(descriptor: int) -> Iterator[None]:
    """Sends what the process writes to its output and errors there."""
    sys.stdout.flush()
    kept = [os.dup(one) for one in (1, 2)]
    try:
        for one in (1, 2):
            os.dup2(descriptor, one)
        yield
    finally:
        for one, before in zip((1, 2), kept, strict=True):
            os.dup2(before, one)
            os.close(before)
