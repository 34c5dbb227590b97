"""Kills processes that export, import, prepare data, save memories or train, and says what is left.

    python -m tests.faults.kills --count 40                     # 40 kills (`kill -9`) of each kind
    python -m tests.faults.kills --count 40 --only export prepare

Half of the moments lie anywhere in the work, half while it writes. After each kill what was made is
whole or absent, what was there before is unchanged, and the same command ends with the same bits.
The last line is a row of a table for each kind. Children are forked before JAX has started, so that
a kill costs a second and not the time of an import.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fwpkm_jax import memories
from fwpkm_jax.config import read_experiment
from fwpkm_jax.data.prepare import prepare, text_files
from fwpkm_jax.interchange import export_run, read_folder, start_run
from fwpkm_jax.interchange.weights import Weights
from fwpkm_jax.io.atomic import write_text
from fwpkm_jax.io.status_line import StatusLine
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.run.load import load_run
from fwpkm_jax.run.train import train
from fwpkm_jax.training.checkpoints.checksum import checksums
from fwpkm_jax.training.checkpoints.restore import array_items, checkpoint_steps
from fwpkm_jax.training.state import init_state, named_leaves
from tests.memories.models import ONE, make_model, make_state
from tests.training import mesh_flags
from tests.training.tiny_config import get_config

_LONGEST = 300.0  # Seconds that any work may take.
_STEPS = 24


class Kind(NamedTuple):
    """What is killed, and how what is left is looked at; all run in children.

    Attributes:
      work: makes what it is to make in a folder of its own; `inputs` is for all kills.
      check: raises unless what is left in the folder is whole or absent; what was found.
      finish: `work` again, and raises unless the end is that of work that was not killed.
      set_up: makes the inputs.
    """

    work: Callable[[Path, Path], None]
    check: Callable[[Path, Path], str]
    finish: Callable[[Path, Path], None]
    set_up: Callable[[Path], None]


def main(arguments: list[str] | None = None) -> int:
    """Kills as many as the command line asks for; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description="Kills processes and says what is left.")
    parser.add_argument("--count", type=int, default=40, help="kills of each kind")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    lost = 0
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            lost += _kill(name, Path(folder), options.count, random.Random(options.seed))
    return int(lost > 0)


def _kill(name: str, folder: Path, count: int, rng: random.Random) -> int:
    kind, inputs = KINDS[name], folder / "inputs"
    inputs.mkdir()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    _Child(kind.set_up, inputs).result()
    for _ in range(2):  # The second one has everything compiled.
        whole = _emptied(folder / "whole")
        began = time.monotonic()
        child = _Child(kind.work, inputs, whole)
        writing = _first_written(whole, child) - began
        child.result()
        seconds = time.monotonic() - began
    before, found, lost = _tree(inputs), {}, 0
    for number in range(count):
        killed = False
        while not killed:  # On a busy machine it may have ended before.
            place = _emptied(folder / "place")
            child = _Child(kind.work, inputs, place)
            if number % 2:
                _first_written(place, child)
                time.sleep(rng.uniform(0, 0.9 * (seconds - writing)))
            else:
                time.sleep(rng.uniform(0, 0.9 * seconds))
            killed = child.kill()
        try:
            state = _Child(kind.check, inputs, place).result()
            _Child(kind.finish, inputs, place).result()
            if _tree(inputs) != before:
                raise AssertionError("the inputs changed")
        except RuntimeError as error:
            lost, state = lost + 1, "LOST"
            print(f"{name} {number}: {error}", flush=True)
        found[state] = found.get(state, 0) + 1
        print(f"{name}: {number + 1} of {count} killed, {found}", flush=True)
    states = ", ".join(f"{state} {number}" for state, number in sorted(found.items()))
    print(f"| `kill -9` during {name} ({states}) | {count} | {count - lost} | {lost} |", flush=True)
    return lost


class _Child:
    """A forked process that runs a function; its result is a JSON value or a traceback."""

    def __init__(self, function: Callable[..., Any], *arguments: Path) -> None:
        self._out, write = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            return
        os.close(self._out)
        try:
            answer = json.dumps([True, function(*arguments)])
        except BaseException:
            answer = json.dumps([False, traceback.format_exc()])
        os.write(write, answer.encode()[:60_000])
        os._exit(0)

    def kill(self) -> bool:
        """Kills it; whether it was still at work."""
        ended, _ = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._out)
        return not ended

    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def result(self) -> Any:
        """What the function returned; raises RuntimeError with its traceback if it raised."""
        with os.fdopen(self._out, "rb") as out:
            said = out.read()
        os.waitpid(self.pid, 0)
        good, value = json.loads(said or b'[false, "it died"]')
        if not good:
            raise RuntimeError(value)
        return value


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _first_written(folder: Path, child: _Child) -> float:
    """Waits until anything is in the folder, or the child has ended; when that was."""
    deadline = time.monotonic() + _LONGEST
    while not any(folder.iterdir()) and child.alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic()


def _tree(folder: Path) -> dict[str, str]:
    """A hash of every file in a folder, but of locks and logs."""
    files = (x for x in sorted(folder.rglob("*")) if x.is_file() and x.name != "lock")
    return {str(x.relative_to(folder)): hashlib.sha256(x.read_bytes()).hexdigest() for x in files}


def _same(found: dict[str, str], expected: dict[str, str]) -> None:
    if found != expected:
        raise AssertionError(f"{sorted(found)} is not {sorted(expected)}, bit for bit")


def _bits(tree: Any) -> str:
    """A hash of the names and bits of the arrays in a tree."""
    total = hashlib.sha256()
    for name, x in named_leaves(tree).items():
        total.update(f"{name} {x.dtype} {x.shape}\n".encode() + np.asarray(x).tobytes())
    return total.hexdigest()


# Exports and imports, of a model of 20 MB, so that writing it takes a while.


def _make_run(inputs: Path) -> None:
    tiny = get_config()
    model = dataclasses.replace(tiny.model, vocab_size=20_000, model_dim=128)
    experiment = dataclasses.replace(tiny, model=model, run_dir=str(inputs / "run"))
    state = init_state(model, memory=tiny.training.memory, optimizer=None, seed=0)
    start_run(experiment, Weights(state.params, state.memory))
    export_run(inputs / "run", inputs / "exported")


def _export(inputs: Path, place: Path) -> None:
    export_run(inputs / "run", place / "out")


def _check_export(inputs: Path, place: Path) -> str:
    if not (place / "out").exists():
        return "absent"
    _same(_tree(place / "out"), _tree(inputs / "exported"))
    return "whole"


def _finish_export(inputs: Path, place: Path) -> None:
    shutil.rmtree(place / "out", ignore_errors=True)
    _export(inputs, place)
    _check_export(inputs, place)


def _import(inputs: Path, place: Path) -> None:
    experiment, weights = read_folder(inputs / "exported")
    start_run(dataclasses.replace(experiment, run_dir=str(place / "run")), weights)


def _check_import(inputs: Path, place: Path) -> str:
    if not (place / "run").exists():
        return "absent"
    imported, source = load_run(place / "run"), load_run(inputs / "run")
    if _bits((imported.params, imported.memory)) != _bits((source.params, source.memory)):
        raise AssertionError("the weights are others")
    return "whole"


def _finish_import(inputs: Path, place: Path) -> None:
    shutil.rmtree(place / "run", ignore_errors=True)
    _import(inputs, place)
    _check_import(inputs, place)


# Preparation of data: a job goes on where it was.


def _make_text(inputs: Path) -> None:
    rng = random.Random(0)
    (inputs / "texts").mkdir()
    words = ["".join(rng.choices("abcdefghij", k=rng.randrange(2, 9))) for _ in range(500)]
    for part in range(4):
        records = (" ".join(rng.choices(words, k=3000)) for _ in range(150))
        lines = (json.dumps({"text": record}) + "\n" for record in records)
        (inputs / "texts" / f"{part}.jsonl").write_text("".join(lines))
    (inputs / "whole").mkdir()
    _prepare(inputs, inputs / "whole")


def _prepare(inputs: Path, place: Path) -> None:
    with open(os.devnull, "w") as nowhere:
        prepare(
            text_files(inputs / "texts"),
            out=place / "x.bin",
            tokenizer="bytes",
            layout="l4096",
            save_seconds=0,
            status=StatusLine(nowhere),
        )


def _check_prepared(inputs: Path, place: Path) -> str:
    if not (place / "x.json").exists():
        return "absent" if not (place / "x.partial.json").exists() else "partial"
    expected = _tree(inputs / "whole")
    found = {name: x for name, x in _tree(place).items() if name in expected}
    _same(found, expected)
    return "whole"


def _finish_prepared(inputs: Path, place: Path) -> None:
    _prepare(inputs, place)
    _same(
        {name: x for name, x in _tree(place).items() if not name.endswith(".lock")},
        _tree(inputs / "whole"),
    )


# Memories: each save is made whole, and a fork is what it was.


def _make_memory(inputs: Path) -> None:
    del inputs


def _numbered(state: Any, number: int) -> Any:
    layer = state.stream.memory["layer_0"]
    table = jax.numpy.full_like(layer.values, number)
    stream = state.stream._replace(memory={"layer_0": layer._replace(values=table)})
    return state._replace(stream=stream)


def _save_memories(inputs: Path, place: Path) -> None:
    """Saves alice with growing numbers and notes each that was reported as saved."""
    del inputs
    model = make_model(ONE)
    state = make_state(model)
    for number in range(1, 40):
        memories.save(place / "m", "alice", _numbered(state, number), model=model)
        write_text(place / "saved", str(number))
        if number % 3 == 0:
            memories.fork(place / "m", "alice", f"alice@{number}")
        if number % 9 == 0:
            memories.delete(place / "m", f"alice@{number - 3}")


def _check_memories(inputs: Path, place: Path) -> str:
    del inputs
    model, saved = make_model(ONE), place / "saved"
    reported = int(saved.read_text()) if saved.exists() else 0
    names = memories.names(place / "m")
    for name in names:
        values = memories.load(place / "m", name, model).stream.memory["layer_0"].values
        (number,) = np.unique(np.asarray(values))
        allowed = [int(name.partition("@")[2])] if "@" in name else [reported, reported + 1]
        if int(number) not in allowed:
            raise AssertionError(f"{name} holds {number}, and {reported} was reported")
    if reported and "alice" not in names:
        raise AssertionError("a memory that was saved is gone")
    return "whole" if names else "absent"


def _finish_memories(inputs: Path, place: Path) -> None:
    model = make_model(ONE)
    memories.save(place / "m", "alice", _numbered(make_state(model), 77), model=model)
    write_text(place / "saved", "77")
    _check_memories(inputs, place)
    for name in memories.names(place / "m"):
        memories.delete(place / "m", name, keep_forks=True)
    # Of a fork that was not made, its lock and its unfinished file may stay until its next save.
    left = sorted(x.name for x in (place / "m").rglob("*") if x.suffix not in (".tmp", ".lock"))
    if left != ["bases", "lock"]:
        raise AssertionError(f"{left} is left")


# A run that is killed on some devices and goes on with others.


def _devices(count: int) -> None:
    os.environ.update(mesh_flags.environment(count))


def _train(place: Path, devices: int, steps: int) -> Any:
    _devices(devices)
    tiny = get_config()
    mesh = MeshConfig(data=2) if devices == 2 else MeshConfig(data=2, fsdp=2, memory="columns")
    experiment = dataclasses.replace(
        tiny,
        run_dir=str(place / "run"),
        mesh=mesh,
        log=(),
        training=dataclasses.replace(tiny.training, steps=steps),
        optimizer=dataclasses.replace(tiny.optimizer, decay_steps=_STEPS),
        checkpoint=dataclasses.replace(tiny.checkpoint, every=2),
    )
    with open(os.devnull, "w") as nowhere:
        return train(experiment, stream=nowhere).state


def _make_compiled(inputs: Path) -> None:
    del inputs


def _train_on_two(inputs: Path, place: Path) -> None:
    del inputs
    _train(place, 2, _STEPS)


def _check_trained(inputs: Path, place: Path) -> str:
    """On one device, the newest checkpoint is read; its checksums are compared with its arrays."""
    del inputs
    steps = checkpoint_steps(place / "run" / "checkpoints")
    if steps and load_run(place / "run").step != steps[-1]:
        raise AssertionError(f"{steps[-1]}, the newest checkpoint, was not read")
    return "whole" if steps else "absent"


def _finish_trained(inputs: Path, place: Path) -> None:
    """Four devices go on and end; what was saved at the kill is what they began with."""
    del inputs
    folder = place / "run" / "checkpoints"
    steps = checkpoint_steps(folder)
    start = steps[-1] if steps else 0
    saved = _checksums(folder, start) if steps else None
    # No step is left, so the state is that of the checkpoint, on four devices.
    state = _train(place, 4, max(start, 1))
    if saved is not None and _checksums_of(state) != saved:
        raise AssertionError(f"step {start} has other bits on four devices")
    _train(place, 4, max(start, 1) + 2)
    if read_experiment(place / "run").training.steps != max(start, 1) + 2:
        raise AssertionError("the run did not go on")


def _checksums(folder: Path, step: int) -> Any:
    position = json.loads((folder / str(step) / "position" / "metadata").read_text())
    return position["checksums"]


def _checksums_of(state: Any) -> Any:
    return {name: checksums(tree) for name, tree in array_items(state).items()}


KINDS = {
    "export": Kind(_export, _check_export, _finish_export, _make_run),
    "import": Kind(_import, _check_import, _finish_import, _make_run),
    "preparation": Kind(_prepare, _check_prepared, _finish_prepared, _make_text),
    "saving of memories": Kind(_save_memories, _check_memories, _finish_memories, _make_memory),
    "training, resumed on other devices": Kind(
        _train_on_two, _check_trained, _finish_trained, _make_compiled
    ),
}

if __name__ == "__main__":
    sys.exit(main())
