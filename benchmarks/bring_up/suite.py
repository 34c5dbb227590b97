"""Everything that needs a GPU, in the order in which its answers matter, resumable in parts.

    python -m benchmarks.bring_up --out out
    python -m benchmarks.bring_up --out out2 --earlier out        # what is missing or changed
    python -m benchmarks.bring_up --out build/tiny --size tiny    # on any CPU

Needs jax, flax, optax, orbax, chex, numpy and pytest; `--wheels` names a folder with wheels of what
else is missing (jaxtyping). Each part runs in a process of its own with a time limit of its own.
What it measures is kept while it runs: a part that fails or is ended leaves that, and is run again
by the next call. No part is started after `--seconds`, and no part needs the file of another.
What was measured of the same source and kind of device is not measured again.

The training steps compile beside the comparisons, on the host's other cores, and are timed when
the comparisons are over.

`--out` gets at most eight files: `cases.jsonl` with a line for each comparison of a kernel with its
reference, `steps.jsonl` with a line for each variant of the training step, `profiles.json` with
every kernel of these steps, `verdicts.json` with the verdicts of kernels' checks before first use,
`results.json` with the result of each part, `running.json`, what a part had measured when the
whole suite was ended, and in `compiled` the executables of two steps.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import processes
from benchmarks.bring_up import sources
from benchmarks.bring_up.files import read_lines, read_object
from benchmarks.options import parse
from benchmarks.processes import ROOT

LIMITS = {"device": 90, "real_model": 120, "parity": 540}
"""Seconds that a part may take; others have `DEFAULT_LIMIT`."""
DEFAULT_LIMIT = 240
SHARES = {"cases": 0.4, "steps": 1.0}
"""Parts that may take a share of `--seconds`. `steps` takes what its variants need of the time that
is left."""
CASES, STEPS, RESULTS, RUNNING = "cases.jsonl", "steps.jsonl", "results.json", "running.json"
PROFILES, VERDICTS, COMPILED = "profiles.json", "verdicts.json", "compiled"
KEPT_LINES = {"cases": CASES, "steps": STEPS}
"""Parts that write a line for each thing that they measure, and skip those that they find."""
BESIDE = {"cases": ("steps", "gated_delta")}
"""Parts that compile while another one runs, if they are to run after it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Runs the parts that are not done."""

    out: Path
    """Folder for the results."""
    earlier: Path | None = None
    """Folder of an earlier call; its results are taken over."""
    size: Literal["tiny", "paper"] = "paper"
    """paper: the paper's widths on a GPU; tiny: some minutes of a CPU."""
    parts: tuple[str, ...] = ()
    """Names of the parts to run, in their order; none: all."""
    again: tuple[str, ...] = ()
    """Beginnings of the names of parts and cases to run again though they are done."""
    seconds: float = 540
    """No part is started after so many seconds, and the one that runs then is ended."""
    part_seconds: float | None = None
    """Seconds that each part may take; None: as `LIMITS` and `SHARES` say."""
    executables: Path | None = None
    """Folder with executables of training steps, made elsewhere; None: those of `--earlier`."""
    variants: tuple[str, ...] = ()
    """Names of the variants of the training step; none: all."""
    operations: tuple[str, ...] | None = None
    """Operations that variants of the training step leave out in turn; None: those that are new."""
    reference: tuple[str, ...] = ()
    """Operations to run as plain JAX, for example value_scan or chunk_gated_delta_rule."""
    jobs: int = 8
    """Comparisons with references that run at the same time, and variants that compile."""
    wheels: Path | None = None
    """Folder with wheels of packages that this Python lacks."""
    cache: Path = ROOT / "build" / "bring_up"
    """Folder for compiled programs and unpacked wheels, to keep from one call to the next."""
    peer: Path | None = None
    """Checkout of the authors' repository, timed beside the memory."""
    peer_python: Path | None = None
    """Python with torch, triton and numpy, for `--peer`."""
    peer_fla: Path | None = None
    """Python with flash-linear-attention, timed beside the gated delta rule."""
    peer_jla: bool = False
    """Times the gated delta rule of jax-linear-attention, too, which must be installed; not with
    size=tiny, because no CPU runs it."""
    peer_titans: Path | None = None
    """Python with titans-pytorch, timed beside the memory block."""
    real_model: Path | None = None
    """Run of an open model with a memory, as `fwpkm train --add_memory` begins one, whose training
    goes on; needs all that `fwpkm train` does."""


def parts(options: Options) -> dict[str, list[str]]:
    """Each part's module and arguments, in the order they run; `OUT` is its file."""
    tiny = options.size == "tiny"
    size, json_out = ["--size", options.size], ["--out", "OUT"]
    few = ["--repeats", "2" if tiny else "10"]

    def program(name: str, *arguments: str) -> list[str]:
        return [f"benchmarks.{name}", *arguments, *json_out]

    jobs = ["--jobs", str(options.jobs)]

    widths = ["--dim", "32", "--length", "256", "--backward_length", "128", "--chunk_size", "64"]
    if tiny:
        memory = ["--subkeys", "8", "--peer_subkeys", "8", "--batch", "1", *widths]
        layer = ["--subkeys", "8", "--batch", "1", "--model_dim", "32", *widths]
    else:
        memory = ["--subkeys", "512", "128", "1024", "--batch", "8", "--backward_length", "4096"]
        layer = [*memory, "--chunk_size", "512"]
        memory += ["--peer_subkeys", "512"]
    memory += ["--allocators", "default"]  # The allocators of the host do not matter on a GPU.
    if options.peer is not None:
        memory += ["--peer", str(options.peer)]
        if options.peer_python is not None:
            memory += ["--peer-python", str(options.peer_python)]
    if options.peer_titans is not None:
        layer += ["--peer-titans", str(options.peer_titans)]
        layer += ["--peer-chunks", *(["16", "64"] if tiny else ["64", "512"])]
    backends = ["pallas", "jla"] if options.peer_jla else ["pallas"]
    rule = ["--backends", *backends, "--dtypes", "bfloat16", "--shapes", "paper", "paper_wide"]
    if tiny:
        rule = ["--backends", "reference", "--dtypes", "bfloat16", "--shapes", "tiny"]
        rule += ["--block-s", "0.01"]
    if options.peer_fla is not None:
        rule += ["--peer-fla", str(options.peer_fla)]
    steps = ["--profiles", str(options.out / PROFILES), "--keep", str(options.out / COMPILED)]
    if tiny:
        steps += ["--batch", "2", "--length", "64", "--steps", "2", "--blocks", "2"]
    made = _executables(options)
    if made is not None:
        steps += ["--executables", str(made)]
    if options.variants:
        steps += ["--variants", *options.variants]
    if options.operations is not None:
        steps += ["--operations", *options.operations]
    cases = ["--verdicts", str(options.out / VERDICTS)]
    found = {
        "device": program("bring_up.device"),
        "cases": program("bring_up.correctness", *size, *jobs, *cases),
        "steps": program("bring_up.steps", *size, *jobs, *steps),
        "memory": program("speed.memory", *few, *memory),
        "gated_delta": program("kernels.gated_delta", *few, *rule),
        "real_model": ["fwpkm_jax", "train", "--resume", str(options.real_model)],
        "decode": program("speed.decode", *size),
        "determinism": program("kernels.determinism", *size),
        "rows": program("kernels.rows", *size, *few),
        "selection": program("kernels.selection", *size, *few),
        "layer": program("speed.layer", *few, *layer),
        "parity": program("kernels.parity"),
    }
    if options.real_model is None:
        del found["real_model"]
    return found


def _executables(options: Options) -> Path | None:
    """The folder of executables to load, if there is one."""
    if options.executables is not None:
        return options.executables
    made = None if options.earlier is None else options.earlier / COMPILED
    return made if made is not None and made.is_dir() else None


def variables(options: Options) -> dict[str, str]:
    """What the parts find in their environment: packages, and the cache of compiled programs."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if options.wheels is not None:
        paths.insert(1, str(unpack(options.wheels, options.cache / "packages")))
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(options.cache.absolute() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    if options.reference:
        found["PALLAS_KERNELS_REFERENCE"] = ",".join(options.reference)
    return found


def unpack(wheels: Path, folder: Path) -> Path:
    """Unpacks every wheel of a folder; needs neither pip nor an index.

    Raises:
      SystemExit: the folder has no wheels.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"--wheels {wheels}: the folder has no files *.whl.")
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(folder)
    return folder.absolute()


class Part:
    """A part that runs in its process, with what it prints kept until someone waits for it."""

    def __init__(self, command: Sequence[str], added: Mapping[str, str] | None = None):
        self.began = time.perf_counter()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by `wait` and `end`.
        self._run = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | dict(added or {}),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, limit_s: float) -> str | None:
        """None, or how the part failed; one that takes too long ends with its children.

        What the part prints is printed as it comes, and its last line ends the reason of a failure.
        """
        log, shown, stop = self._log.fileno(), 0, time.perf_counter() + limit_s
        try:
            while True:
                over = self._run.poll() is not None
                shown = _show(log, shown)
                if over or time.perf_counter() > stop:
                    break
                time.sleep(0.2)
            if not over:
                return f"ended after its {limit_s:g} s"
            if self._run.returncode == 0:
                return None
            written = os.pread(log, shown, 0).decode(errors="replace")
            return processes.how_it_ended(self._run.returncode, written)
        finally:
            self.end()

    def end(self) -> None:
        """Ends the part with all that it started."""
        if self._run.poll() is None:
            processes.end(self._run)
        self._log.close()


def run_part(
    command: Sequence[str], *, limit_s: float, added: Mapping[str, str] | None = None
) -> str | None:
    """Runs a part; None, or how it failed."""
    return Part(command, added).wait(limit_s)


def _show(log: int, start: int) -> int:
    """Prints what a part wrote after `start`; returns where that ends."""
    while written := os.pread(log, 2**16, start):
        sys.stdout.write(written.decode(errors="replace"))
        start += len(written)
    sys.stdout.flush()
    return start


def take_over(options: Options) -> dict[str, Any]:
    """The results so far, of this folder and of the earlier one, without what is to run again."""
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    lines: dict[str, dict[str, Any]] = {name: {} for name in KEPT_LINES}
    for folder in filter(None, (options.earlier, options.out)):
        results |= read_object(folder / RESULTS)
        for name, file in KEPT_LINES.items():
            lines[name] |= {_line_name(row): row for row in read_lines(folder / file)}
    for file in (PROFILES, VERDICTS):
        before = None if options.earlier is None else options.earlier / file
        if before is not None and before.exists() and not (options.out / file).exists():
            shutil.copyfile(before, options.out / file)
    anew = tuple(options.again)
    results = {
        name: found for name, found in results.items() if not (anew and name.startswith(anew))
    }
    for name, file in KEPT_LINES.items():
        rows = lines[name]
        kept = [row for line, row in rows.items() if not (anew and line.startswith(anew))]
        if name in anew:
            kept = []
        if rows:
            (options.out / file).write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    return results


def _line_name(row: Mapping[str, Any]) -> str:
    """What `--again` calls a line: `slot_add/hottest`, or `gdn/all`."""
    return row["case"] if "case" in row else f"{row['model']}/{row['variant']}"


def save(options: Options, results: Mapping[str, Any]) -> None:
    partial = options.out / f"{RESULTS}.partial"
    partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    partial.replace(options.out / RESULTS)


class _Suite:
    """The parts of one call, and the time that is left for them."""

    def __init__(self, options: Options):
        self.options, self.start = options, time.perf_counter()
        self.results, self.added = take_over(options), variables(options)
        self.wanted = list(options.parts or parts(options))
        self.go = Path(tempfile.mkdtemp()) / "go"
        self.beside: dict[str, Part] = {}
        self.failed: list[str] = []
        save(options, self.results)

    @property
    def left(self) -> float:
        return self.options.seconds - (time.perf_counter() - self.start)

    @property
    def device(self) -> str | None:
        """The kind of device, once the part that says so has run."""
        return self.results.get("device", {}).get("result", {}).get("device")

    def limit(self, name: str) -> float:
        limit = LIMITS.get(name, DEFAULT_LIMIT)
        if name in SHARES:
            limit = SHARES[name] * self.options.seconds
        return min(self.options.part_seconds or limit, self.left)

    def done(self, name: str) -> bool:
        """Whether a part's result is of this source and device; those with lines see themselves."""
        row = self.results.get(name, {})
        if name == "device" or name in KEPT_LINES or row.get("status") != "done":
            return False
        return sources.is_measured(row, sources.of_step(), self.device)

    def command(self, name: str, *, after: float = 0.0) -> list[str]:
        """The part's command; one that compiles beside another has so many seconds more."""
        out = self.options.out
        file = out / KEPT_LINES.get(name, RUNNING)
        command = [str(file) if a == "OUT" else a for a in parts(self.options)[name]]
        if name in KEPT_LINES and self.device is not None:
            command += ["--device", self.device]
        if name in KEPT_LINES:  # They end by themselves, and say what they left out.
            seconds = min(self.limit(name) + after, self.left) - 5
            command += ["--seconds", f"{max(0.0, seconds):.0f}"]
        return command

    def begin_beside(self, name: str) -> None:
        """Starts what compiles while the part `name` runs."""
        for other in BESIDE.get(name, ()):
            later = self.wanted[self.wanted.index(name) :]
            if other not in later or self.done(other):
                continue
            command = self.command(other, after=self.limit(name))
            if other == "steps":
                command += ["--wait-for", str(self.go)]
                self.beside[other] = Part(command, self.added)
            else:
                command[command.index("--out") + 1] = os.devnull
                self.beside[f"{other}, compiled"] = Part([*command, "--prepare"], self.added)

    def run(self, name: str) -> None:
        if self.done(name):
            print(f"{name}: done before")
            return
        if name not in self.beside and self.left <= 0:
            over = f"not started, {self.options.seconds:.0f} s are over"
            print(f"{name}: {over}; run the command again.", flush=True)
            self.failed.append(name)
            # A result of before stays, with its own source.
            self.results.setdefault(name, {"status": over})
            save(self.options, self.results)
            return
        self.begin_beside(name)
        part = self.beside.pop(name, None) or Part(self.command(name), self.added)
        failure = part.wait(self.limit(name))
        if name in BESIDE:
            self._quiet()
        row: dict[str, Any] = {"status": failure or "done"}
        row["seconds"] = time.perf_counter() - part.began
        row |= {"source": sources.of_step(), "device": self.device}
        running = self.options.out / RUNNING
        if name in KEPT_LINES:
            row["result"] = _counts(read_lines(self.options.out / KEPT_LINES[name]))
        else:
            row["result"] = read_object(running)
            running.unlink(missing_ok=True)
        self.results[name] = row
        save(self.options, self.results)
        if failure is not None:
            self.failed.append(name)
        print(f"{name}: {row['status']}, {row['seconds']:.0f} s", flush=True)

    def _quiet(self) -> None:
        """After a part that others compiled beside: those that only compile end, others go on."""
        for name in [name for name in self.beside if name.endswith(", compiled")]:
            print(f"{name}: {self.beside.pop(name).wait(10) or 'done'}", flush=True)
        self.go.touch()

    def end(self) -> None:
        for part in self.beside.values():
            part.end()
        shutil.rmtree(self.go.parent, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    unknown = set(options.parts) - set(parts(options))
    if unknown:
        raise SystemExit(
            f"--parts: no such part: {sorted(unknown)}; there are {list(parts(options))}."
        )
    suite = _Suite(options)
    # Otherwise what the parts have started would go on beside the next program.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in suite.wanted:
            suite.run(name)
    finally:
        suite.end()
        signal.signal(signal.SIGTERM, before)
    return 1 if suite.failed else 0


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many lines say what: the verdicts of cases, or how many steps were timed."""
    said = [row.get("verdict") or ("failed" if "failed" in row else "timed") for row in rows]
    return {one: said.count(one) for one in sorted(set(said))}


if __name__ == "__main__":
    sys.exit(main())
