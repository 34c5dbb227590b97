"""`python -m tests.faults.fuzz`: files that lie, read in processes with limits; prints a table.

Each file is made from its number alone, so that `--reader NAME --first 4711 --files 1 --show` reads
one again here, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
MEMORY = 2**28
"""Bytes of address space beyond what a good file takes."""
SECONDS = 5
"""Of computing, for one file."""
_WALL = 120  # Seconds; a machine may do a lot else.
_MOST_MESSAGE = 2000
_KEPT = 20
_PATHS: list[str] = []
"""Where the processes find modules, too."""


def main() -> int:
    """Reads the files of a command line; 1 if one did what none may do."""
    from tests.faults.fuzz.readers import READERS

    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=100, help="for each reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--reader", choices=[*READERS], action="append", help="all by default")
    parser.add_argument("--show", action="store_true", help="read here, with tracebacks")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.reader or [*READERS]
    if options.child:
        return _child(names[0], options.first, options.files)
    if options.show:
        return _show(names[0], options.first, options.files)
    print(_ROW.format(*_HEADER), flush=True)
    failed = []
    for name in names:
        found = tried(name, options.first, options.files)
        print(_ROW.format(name, *found.row()), flush=True)
        failed += [f"{name}, file {number}: {what}" for number, what in found.failures.items()]
    for line in failed[: _KEPT * len(names)]:
        print(line)
    return int(bool(failed))


_HEADER = (
    *("reader", "files", "read", "refused", "traceback", "signal", "too slow", "MiB", "CPU s"),
)
_ROW = "{:22} {:>6} {:>6} {:>8} {:>10} {:>7} {:>9} {:>6} {:>6}"


class Found:
    """What became of the files of one reader."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: dict[int, str] = {}
        self.most_mib = 0
        self.cpu = 0.0

    def row(self) -> tuple[Any, ...]:
        """The columns of the table behind the reader's name."""
        kinds = ("read", "refused", "traceback", "signal", "too slow")
        counts = [self.outcomes[kind] for kind in kinds]
        return (sum(counts), *counts, self.most_mib, round(self.cpu))

    def add(self, number: int, kind: str, what: str = "") -> None:
        """Counts the file of a number."""
        self.outcomes[kind] += 1
        if kind not in ("read", "refused"):
            self.failures[number] = f"{kind}: {what}"


def tried(name: str, first: int, files: int) -> Found:
    """Reads files of a reader in processes; one that dies or is late is followed by another."""
    found, number = Found(), first
    while number < first + files:
        number = _one_process(name, number, first + files - number, found)
    return found


def _one_process(name: str, first: int, files: int, found: Found) -> int:
    """Reads files in one process, as far as it comes; the number of the next file."""
    arguments = ["--reader", name, "--first", str(first), "--files", str(files), "--child"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.fuzz", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *_PATHS]),
            "JAX_PLATFORMS": "cpu",
            "MALLOC_ARENA_MAX": "2",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    number, late, cpu_before = first, False, 0.0
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        started = time.monotonic()
        begun = False
        while True:
            if not ready.select(timeout=1):
                waited = time.monotonic() - started
                busy = _cpu_of(process.pid) - cpu_before
                if waited > (_WALL if begun else 5 * _WALL) or (begun and busy > SECONDS + 1):
                    late = True
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                continue
            line = process.stdout.readline()
            if not line:
                break
            report = json.loads(line)
            started, begun = time.monotonic(), True
            cpu_before = report["cpu"]
            found.most_mib = max(found.most_mib, report["mib"])
            if "kind" in report:
                found.add(number, report["kind"], report["what"])
                number += 1
    process.stdout.close()
    code = process.wait()
    if not begun:
        raise RuntimeError(f"{name}: good files cannot be read, exit code {code}.")
    found.cpu += cpu_before
    if number == first + files and not late:
        return number
    found.add(number, "too slow" if late else "signal", f"exit code {code}")
    return number + 1


def _cpu_of(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _child(name: str, first: int, files: int) -> int:
    """Reads files and reports each in one line of JSON."""
    from tests.faults.fuzz.readers import READERS

    reader = READERS[name]
    out = os.fdopen(os.dup(1), "w")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        good, folder = Path(temporary) / "good", Path(temporary) / "tried"
        _without_drawing()
        reader.good(good)
        for _ in range(2):  # The first time imports and compiles.
            reader.read(_copied(good, folder))
        before = _address_space()
        resource.setrlimit(resource.RLIMIT_AS, (before + MEMORY, resource.RLIM_INFINITY))
        _report(out)
        for number in range(first, first + files):
            _copied(good, folder)
            _damage(name, folder, number)
            began = time.process_time()
            try:
                kind, what = _outcome(reader, folder)
            except MemoryError:
                kind, what = "traceback", "MemoryError"
            taken = time.process_time() - began
            if taken > SECONDS:
                kind, what = "too slow", f"{taken:.1f} s"
            _report(out, kind=kind, what=what[:500])
    return 0


def _report(out: Any, **values: Any) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    values |= {"mib": used.ru_maxrss // 1024, "cpu": used.ru_utime + used.ru_stime}
    print(json.dumps(values), file=out, flush=True)


def _outcome(reader: Any, folder: Path) -> tuple[str, str]:
    from fwpkm_jax.io.untrusted import OutsideFileError

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            reader.read(folder)
    except (OutsideFileError, FileNotFoundError) as error:
        message = str(error)
        if "\n" in message or len(message) > _MOST_MESSAGE or str(folder) not in message:
            return "traceback", f"a message that is not one line with the file: {message[:300]!r}"
        if not message.isprintable():
            return "traceback", f"a message with control characters: {message[:300]!r}"
        return "refused", ""
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:300]}"
    return "read", ""


def _show(name: str, first: int, files: int) -> int:
    from tests.faults.fuzz.readers import READERS

    reader = READERS[name]
    with tempfile.TemporaryDirectory() as temporary:
        good, folder = Path(temporary) / "good", Path(temporary) / "tried"
        reader.good(good)
        for number in range(first, first + files):
            _copied(good, folder)
            for file, content in _damage(name, folder, number).items():
                print(f"{number}, {file}: {content[:3000]!r}", flush=True)
            reader.read(folder)
    return 0


def _copied(good: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(good, folder, copy_function=shutil.copyfile))


def _damage(name: str, folder: Path, number: int) -> dict[str, bytes]:
    """Damages files of a folder as the number says; what they hold then."""
    from tests.faults.fuzz.readers import READERS

    rng = random.Random(f"{name} {number}")
    kinds = READERS[name].files
    chosen = rng.sample(sorted(kinds), 1 if rng.random() < 0.8 else min(2, len(kinds)))
    made = {}
    for file in chosen:
        path = folder / file
        made[file] = kinds[file](path.read_bytes(), rng)
        path.unlink()  # It may be one file under two names.
        path.write_bytes(made[file])
    return made


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _without_drawing() -> None:
    """Figures are made and not rendered, which takes most of a report's time and reads no file."""
    from matplotlib.figure import Figure

    def savefig(self: Any, path: IO[bytes], **_: Any) -> None:
        del self
        path.write(_PIXEL)

    Figure.savefig = savefig


_PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360"
    "0000000000050001a5f645400000000049454e44ae426082"
)


if __name__ == "__main__":
    sys.exit(main())
