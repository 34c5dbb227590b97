"""Runs programs, `benchmarks.speed.memory`, in the test's own process, at the smallest sizes."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import machine, processes

SMALL_RUN = (
    *("data.length=96", "model.model_dim=16", "model.mlp_dim=16", "model.attention.head_dim=8"),
    *("model.fast_weight.chunk_size=32", "training.log_every=1"),
)
"""For `--extra` of a study, with `write_words`: its runs at the least sizes."""


@contextmanager
def in_process(peer: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> Iterator[None]:
    """Workers run in this process, `peer` answers for peers, and the device's limits are made up.

    JSON goes between a program and its workers, as it does between processes.
    """

    def run_worker(module: str, task: Any, **_: Any) -> dict[str, Any]:
        result = importlib.import_module(module).work(json.loads(json.dumps(task)))
        return json.loads(json.dumps(result))

    def run_json(command: list[str], **_: Any) -> dict[str, Any]:
        assert peer is not None, command
        assert Path(command[1]).is_file()
        return peer(json.loads(command[command.index("--task") + 1]))

    class Conversation:
        """Hears what a generator of this process yields, or what `peer` answers each time."""

        def __init__(self, command: list[str], **_: Any):
            assert peer is not None, command
            task = json.loads(command[command.index("--task") + 1])
            answer = peer
            self._lines = iter(lambda: answer(task), None)

        @classmethod
        def of(cls, module: str, task: Any, **_: Any) -> "Conversation":
            self = cls.__new__(cls)
            self._lines = importlib.import_module(module).talk(json.loads(json.dumps(task)))
            return self

        def hear(self, limit_s: float) -> dict[str, Any]:
            del limit_s
            return json.loads(json.dumps(next(self._lines)))

        def tell(self) -> None: ...

        def end(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Conversation", Conversation)
        patch.setattr(processes, "run_worker", run_worker)
        patch.setattr(processes, "run_json", run_json)
        patch.setattr(machine, "copy_bandwidth", lambda num_bytes=None: 1e9)
        patch.setattr(machine, "matmul_rate", lambda size=0, dtype=None: 1e9)
        yield


def run(program: str, *arguments: Any, **in_process_of: Any) -> int | None:
    """What the program's `main` returns for a command line."""
    module = importlib.import_module(program)
    with in_process(**in_process_of):
        return module.main([str(argument) for argument in arguments])


def run_apart(program: str, *arguments: Any, **variables: str) -> None:
    """Runs the program in a process of its own, with these environment variables."""
    command = [sys.executable, "-m", program, *map(str, arguments)]
    subprocess.run(command, cwd=processes.ROOT, check=True, env=os.environ | variables)


def result(path: Path) -> Any:
    """The JSON that a program wrote."""
    return json.loads(path.read_text(encoding="utf-8"))


def result_lines(path: Path) -> list[Any]:
    """The lines of JSON that a program wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_words(folder: Path) -> None:
    """Writes one document of 3,000 random words as train.jsonl and valid.jsonl."""
    rng = np.random.default_rng(0)
    words = " ".join("".join(rng.choice(list("abcdefgh"), 5)) for _ in range(3000))
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"id": "0", "text": words}))


_ALONE = "FWPKM_JAX_TEST_ALONE"


def ran_alone(request: pytest.FixtureRequest) -> bool:
    """Runs the test that asks in a new process; True where it asked first, which then ends.

    XLA for CPUs can load an executable that was written in the same process without functions that
    the process had compiled before ("Function ... not found").
    """
    if os.environ.get(_ALONE):
        return False
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", request.node.nodeid],
        cwd=request.config.rootpath,
        env=kept | {_ALONE: "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return True
