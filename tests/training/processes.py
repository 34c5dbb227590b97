"""Starts `train.py` as several processes on this machine that train together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.training import mesh_flags

ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("tiny_config.py")


def start(run_dir, *arguments, count=2, devices=1, program=("train.py",), environment=()):
    """The processes of one run, started.

    Args:
      run_dir: the directory they share.
      arguments: more of the command line, the same for all.
      count: how many; 1 starts one that knows of no others.
      devices: simulated devices of each.
      program: what Python runs.
      environment: variables to set, as a dict.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = [*program, str(CONFIG), "--run_dir", str(run_dir), *map(str, arguments)]
    processes = []
    for process_id in range(count):
        mine = (
            f"--distributed.coordinator=localhost:{port}",
            f"--distributed.num_processes={count}",
            f"--distributed.process_id={process_id}",
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, *common, *(mine if count > 1 else ())],
                cwd=ROOT,
                env={
                    **os.environ,
                    **mesh_flags.environment(devices),
                    "PYTHONPATH": str(ROOT),
                    **dict(environment),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def finish(processes, *, seconds=300):
    """Exit codes, outputs and errors; kills processes that have not ended in time."""
    try:
        results = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *texts) for p, texts in zip(processes, results, strict=True)]
