"""Reads what the H100's compilers write of Mosaic GPU kernels: instructions, registers, spills."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

_REPORT = re.compile(
    r"properties for (?P<kernel>\w+)_mosaic_gpu_kernel\n"
    r".* (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers"
)
_INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+ )?([a-z][\w.]*)[^\n]*;", re.MULTILINE)


def assembled(traced: Any) -> dict[str, dict[str, int]]:
    """Compiles a traced function, and counts what each of its kernels became.

    Nothing is written about a program that this process compiled before.
    """
    return compiled_and_report(traced)[1]


def compiled_and_report(traced: Any) -> tuple[Any, dict[str, dict[str, int]]]:
    """The compiled function besides, for the device of its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        # Variables by which JAX writes its kernels, and what the assembler says, to a folder.
        asked = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        with mock.patch.dict(os.environ, asked):
            compiled = traced.lower().compile()
        files = sorted(Path(folder).glob("*.ptxas"))
        rows = [counted(x.read_text(), x.with_suffix(".ptx").read_text()) for x in files]
    return compiled, {kernel: row for kernels in rows for kernel, row in kernels.items()}


def counted(report: str, program: str) -> dict[str, dict[str, int]]:
    """Counts of one kernel, by its name.

    Args:
      report: what the assembler says of it: registers, and bytes that are spilled to memory.
      program: its PTX, the assembler's input. On an H100 a warp executes about nine tenths as many
        instructions where the program has no loop.
    """
    found = _REPORT.search(report)
    if found is None:
        raise ValueError(f"no kernel's registers in the assembler's report {report!r}.")
    instructions = _INSTRUCTION.findall(program)
    return {
        found["kernel"]: {
            "registers": int(found["registers"]),
            "spill_store_bytes": int(found["stores"]),
            "spill_load_bytes": int(found["loads"]),
            "instructions": len(instructions),
            "barriers": sum(x.startswith("bar.sync") for x in instructions),
        }
    }
