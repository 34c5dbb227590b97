"""`python -m tests.faults.places`: every place of a received folder where a file is opened.

Commands run on whole folders (a run, its memories, an audit's bundle, exported weights) while what
they open is traced. Each place then becomes, in turn, a link to a file outside, a pipe, a device,
a folder, and 3 GB of zeros, and the command that opened it runs again. Prints one line for each.
What a bucket and a hub send lies in folders, too (`remote_places.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.faults import remote_places

ROOT = Path(__file__).parents[2]
ODD = ("link", "pipe", "device", "folder", "zeros")
MEMORY_MIB = 300
SECONDS = 10
"""Of computing. A command that computes for less than `_AWAKE` seconds in `_WALL` seconds hangs."""
_WALL, _AWAKE = 30, 1
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling is most of what such small models cost."""
SECRET = b"what the user never shares"


class Place(NamedTuple):
    """A file or folder, and where in the code it is opened."""

    path: str
    opener: str


class Case(NamedTuple):
    """A command on folders in which one place is odd."""

    command: str
    place: Place
    odd: str


class Outcome(NamedTuple):
    """What the command did.

    Attributes:
      kind: "refused" in one line, "done", or what may not be: "traceback", "hangs", "leaks",
        "memory", "slow".
      said: its line, or what is wrong.
    """

    kind: str
    said: str = ""
    mib: int = 0
    cpu_s: float = 0.0

    @property
    def right(self) -> bool:
        return self.kind in ("refused", "done")


Command = Callable[[Path], int | None]


# Folders without a trained model: what is read of them before anything is compiled.


def make_small(folder: Path) -> None:
    """A run with memories, results and a log, and a bundle of an audit."""
    from fwpkm_jax import memories
    from tests.faults.fuzz.readers import _memory_model, _run, bundle

    _run(folder / "run")
    model, state = _memory_model()
    memories.save(folder / "run" / "memories", "alice", state, model=model)
    memories.fork(folder / "run" / "memories", "alice", "bob")
    shutil.copytree(folder / "run" / "memories", folder / "memories")
    bundle(folder / "bundle")


def _fork(folder: Path) -> None:
    from fwpkm_jax import memories

    memories.fork(folder / "memories", "bob", "carol")


def _program(*arguments: str) -> Command:
    def run(folder: Path) -> int:
        from fwpkm_jax.cli import main

        named = [x.replace("BUCKET", f"memory://{folder}/bucket") for x in arguments]
        return main([x.replace("HERE", str(folder)) for x in named])

    return run


SMALL: dict[str, Command] = {
    "memories": _program("memories", "HERE/run"),
    "memories --show": _program("memories", "HERE/run", "--show", "bob"),
    "memories.fork": _fork,
    "memories --delete": _program("memories", "HERE/run", "--delete", "bob"),
    "report": _program("report", "HERE/run"),
    "audit BUNDLE": _program("audit", "HERE/bundle"),
}


# Folders with a model of one step of training.


def make_whole(folder: Path, runs: str = "HERE") -> None:
    """A transformers folder, a run imported from it, a run with a memory, weights of its own."""
    from tests.data.chat_tokenizer import TEMPLATE, save_tokenizer
    from tests.interchange.test_outside_weights import qwen_folder, qwen_tensors

    model = qwen_folder(folder / "model", qwen_tensors())
    save_tokenizer(model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "generation_config.json").write_text('{"eos_token_id": 3}')
    for command in (
        _program("import", "hf", "HERE/model", f"{runs}/imported"),
        _program("train", "--base", f"{runs}/imported", "--run_dir", f"{runs}/run", *_TRAINING),
        _generate(runs),
        _program("export", f"{runs}/run", "HERE/weights"),
    ):
        with _quiet() as said:
            code = command(folder)
        assert not code, said.getvalue()


_TRAINING = (
    *("--training.steps", "1", "--training.validation_batches", "0"),
    *("--training.batch_size", "2", "--data.length", "32"),
    *("--model.memory_layers", "0", "--model.fast_weight.rule.num_subkeys", "8"),
    *("--model.fast_weight.chunk_size", "16", "--model.fast_weight.rule.key_dim", "8"),
    *("--model.fast_weight.rule.value_dim", "8"),
)


def _generate(runs: str) -> Command:
    say = ("--memory", "alice", "--prompt", "the cat", "--max_new_tokens", "3")
    return _program("generate", f"{runs}/run", *say)


def _load(folder: Path) -> None:
    from fwpkm_jax.run.load import load_run

    load_run(folder / "run")


def _weights(folder: Path) -> None:
    from fwpkm_jax.interchange import read_folder

    read_folder(folder / "weights")


def _chat(folder: Path) -> int:
    sys.stdin = io.StringIO("the cat\n/memory\n")
    return _program("chat", "HERE/run", "--memory", "alice", "--max_new_tokens", "3")(folder) or 0


def _audit(folder: Path) -> int:
    """Without what is asked of the model, which takes a minute and opens nothing of the folder."""
    from fwpkm_jax.cli import audit_command
    from tests.faults.fuzz.readers import audited

    with mock.patch.object(audit_command, "audit_run", return_value=audited()):
        code = _program("audit", "HERE/run", "--seeds", "HERE/run")(folder)
    return 0 if code == 1 else code or 0  # 1: of these answers a line fails.


WHOLE: dict[str, Command] = {
    "load_run": _load,
    "export": _program("export", "HERE/run", "HERE/out"),
    "export hf": _program("export", "hf", "HERE/imported", "HERE/out"),
    "import hf": _program("import", "hf", "HERE/model", "HERE/out"),
    "read_folder": _weights,
    "generate": _generate("HERE"),
    "chat": _chat,
    "train --resume": _program("train", "--resume", "HERE/run"),
    "eval": _program("eval", "HERE/run", "--limit", "1", "--ppl.max_tokens", "100"),
    "audit RUN": _audit,
}


# Folders of a bucket, and of a hub.


def make_remote(folder: Path) -> None:
    """A run in a bucket; a model and texts in the bucket and at a hub."""
    remote_places.connect(folder)
    (folder / "bucket").mkdir()
    make_whole(folder, "BUCKET")
    remote_places.fill(folder)


def _prepare(source: str) -> Command:
    def run(folder: Path) -> int:
        from fwpkm_jax.data.prepare.command import main

        texts = source.replace("BUCKET", f"memory://{folder}/bucket")
        how = ("--tokenizer", "bytes", "--layout", "stream")
        return main(["text", "--input", texts, "--out", f"{folder}/out/a.bin", *how])

    return run


REMOTE: dict[str, Command] = {
    "memories": _program("memories", "BUCKET/run"),
    "generate": _generate("BUCKET"),
    "train --resume": _program("train", "--resume", "BUCKET/run"),
    "export hf": _program("export", "hf", "BUCKET/imported", "HERE/out"),
    "import hf": _program("import", "hf", "BUCKET/model", "HERE/out"),
    "prepare": _prepare("BUCKET/texts"),
    "import hf NAME": _program("import", "hf", remote_places.MODEL, "HERE/out"),
    "prepare hf://": _prepare(f"hf://datasets/{remote_places.TEXTS}"),
}
SETS: dict[str, tuple[Callable[[Path], None], dict[str, Command], tuple[str, ...]]] = {
    "small": (make_small, SMALL, ODD),
    "whole": (make_whole, WHOLE, ODD),
    "remote": (make_remote, REMOTE, ("device", "folder", "zeros")),
}


def traced(command: Command, folder: Path) -> list[Place]:
    """What a command opens in a folder that is there before it, or is looked for in vain."""
    found: dict[Place, None] = {}
    given = {x.name for x in folder.iterdir()}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not tracing:
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path)).removeprefix(f"{folder}/")
        made = event == "open" and arguments[2] & os.O_CREAT and not os.path.lexists(path)
        top, _, below = name.partition("/")
        listed = event != "open" and top == "bucket"  # Which has no folders.
        # The user names the folders themselves.
        if below and top in given and not (made or listed):
            found[Place(name, _opener())] = None

    tracing = True
    sys.addaudithook(hook)
    with _quiet() as said:
        code = command(folder)
    tracing = False
    assert not code, said.getvalue()
    return [*found]


def _opener() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("fwpkm_jax.") and not name.startswith("fwpkm_jax.io."):
            return f"{name.removeprefix('fwpkm_jax.')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "a library's thread"


def cases(
    commands: dict[str, Command], good: Path, work: Path, odds: tuple[str, ...] = ODD
) -> list[Case]:
    """Each place with the first command that opens it there, made odd in every way."""
    first: dict[Place, str] = {}
    for name, command in commands.items():
        _copied(good, work)
        for place in traced(command, work):
            first.setdefault(place, name)
        read = {"load_run": "[!o]*", "train --resume": "optimizer"}.get(name)
        for file in sorted(work.glob(f"run/checkpoints/*/{read}/**/*")) if read else ():
            path = file.relative_to(work).as_posix()  # A library reads these without a trace.
            if file.is_file() and not any(place.path == path for place in first):
                first[Place(path, "a library")] = name
    return [Case(name, place, odd) for place, name in first.items() for odd in odds]


def _copied(good: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work)
    (work / "elsewhere").mkdir()


def make_odd(path: Path, odd: str, elsewhere: Path) -> None:
    """Puts the odd thing in a place."""
    outside = elsewhere / "outside"
    if path.is_dir():
        shutil.copytree(path, outside)
        shutil.rmtree(path)
        (outside / "secret.json").write_bytes(SECRET)
    else:
        content = path.read_bytes() if path.is_file() else b""
        with contextlib.suppress(ValueError):  # A JSON object stays one.
            values = json.loads(content)
            if isinstance(values, dict):
                content = json.dumps(values | {"note": SECRET.decode()}).encode()
        outside.write_bytes(content if SECRET in content else content + SECRET)
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if odd == "link":
        path.symlink_to(outside)
    elif odd == "pipe":
        os.mkfifo(path)
    elif odd == "device":
        path.symlink_to("/dev/zero")
    elif odd == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(3 * 2**30)


class _Late(BaseException):
    """A command waits for ever."""


class _Alarm:
    """Ends a command that waits; on a busy machine one that computes may take long."""

    def __init__(self) -> None:
        self.began = self._seen = time.process_time()
        self._heard = signal.signal(signal.SIGALRM, self._look)
        signal.alarm(_WALL)

    def _look(self, *_: object) -> None:
        now = time.process_time()
        if now - self._seen < _AWAKE or now - self.began > 3 * SECONDS:
            raise _Late
        self._seen = now
        signal.alarm(_WALL)

    def off(self) -> None:
        """Before the next command."""
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._heard)


def tried(command: Command, case: Case, good: Path, work: Path) -> Outcome:
    """Runs a command on folders in which a place is odd."""
    # Before the memory is looked at: it brings JAX, which not every command does.
    from fwpkm_jax.training.checkpoints.restore import DamagedCheckpointError

    _copied(good, work)
    place, elsewhere = work / case.place.path, work / "elsewhere"
    make_odd(place, case.odd, elsewhere)
    outside = _contents(elsewhere)
    Path("/proc/self/clear_refs").write_text("5")  # The largest resident set is counted anew.
    before, alarm = _peak_mib(), _Alarm()
    code: Any = None
    try:
        with _quiet() as said:
            code = command(work)
    except _Late:
        return Outcome("hangs", "", _peak_mib() - before, time.process_time() - alarm.began)
    except (OSError, ValueError, DamagedCheckpointError) as error:  # A command prints it.
        code = 2
        said.write(str(error) if str(work) in str(error) else traceback.format_exc())
    except BaseException:
        said.write(traceback.format_exc())
    finally:
        alarm.off()
    mib, cpu = _peak_mib() - before, time.process_time() - alarm.began
    text = said.getvalue().strip()
    last = text.splitlines()[-1] if text else ""
    if "Traceback" in text or (code and not last):
        return Outcome("traceback", last, mib, cpu)
    if mib > MEMORY_MIB or "more memory than there is" in text:
        return Outcome("memory", last, mib, cpu)
    if cpu > SECONDS:
        return Outcome("slow", last, mib, cpu)
    if _contents(elsewhere) != outside:
        return Outcome("leaks", "changed what lies outside", mib, cpu)
    if case.odd == "link" and (leak := _with_secret(work, elsewhere)):
        return Outcome("leaks", f"the secret stands in {leak}", mib, cpu)
    return Outcome("refused" if code else "done", last.replace(str(work), ""), mib, cpu)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(x): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def _with_secret(work: Path, elsewhere: Path) -> str:
    """The first file of the folders that holds what lies outside; a link to it does not count."""
    for folder, folders, files in os.walk(work):
        folders[:] = [x for x in folders if Path(folder, x) != elsewhere]
        for path in (Path(folder, x) for x in files):
            if path.is_file() and not path.is_symlink() and SECRET in path.read_bytes():
                return str(path.relative_to(work))
    return ""


def _peak_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) // 1024


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        yield said


def outcomes(name: str, *, only: tuple[str, ...] = ODD) -> Iterator[tuple[Case, Outcome]]:
    """Tries every case of a set in processes; one that hangs is killed and followed by another."""
    with tempfile.TemporaryDirectory() as temporary:
        make = [sys.executable, "-m", "tests.faults.places", name, "--in", temporary]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2",
            "FWPKM_JAX_CACHE": f"{temporary}/programs", "XLA_FLAGS": _QUICK,
        }  # fmt: skip
        subprocess.run([*make, "--make"], cwd=ROOT, env=environment, check=True)
        listed = json.loads(Path(temporary, "cases.json").read_text())
        all_cases = [Case(x[0], Place(*x[1]), x[2]) for x in listed]
        wanted = [n for n, case in enumerate(all_cases) if case.odd in only]
        while wanted:
            arguments = [*make, "--cases", ",".join(map(str, wanted))]
            process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip
            assert process.stdout is not None
            with selectors.DefaultSelector() as ready, process:
                ready.register(process.stdout, selectors.EVENT_READ)
                patience = 40 * _WALL  # A process runs its commands once before the first case.
                while wanted and ready.select(timeout=patience):
                    patience = 20 * _WALL
                    line = process.stdout.readline()
                    if not line:
                        break
                    yield all_cases[wanted.pop(0)], Outcome(*json.loads(line))
                if wanted:  # It hangs where no signal is heard, or died.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    yield all_cases[wanted.pop(0)], Outcome("hangs", "killed")


def _child(name: str, folder: Path, numbers: str | None) -> None:
    make, commands, odds = SETS[name]
    good, work = folder / "good", folder / "work"
    if numbers is None:
        good.mkdir()
        make(good)
        if name == "remote":
            remote_places.connect(work)
        found = cases(commands, good, work, odds)
        (folder / "cases.json").write_text(json.dumps(found))
        return
    if name == "remote":
        remote_places.connect(work)
    listed = json.loads((folder / "cases.json").read_text())
    out = os.fdopen(os.dup(1), "w")
    # Orbax drops its other reads where one fails; they would be told while a later case runs.
    sys.unraisablehook = lambda unraisable: None
    logging.getLogger("asyncio").disabled = True

    for command in {listed[int(n)][0]: 0 for n in numbers.split(",")}:  # The first time imports.
        _copied(good, work)
        with _quiet():
            commands[command](work)
    most = 4 * 2**30 + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    for number in numbers.split(","):
        command, place, odd = listed[int(number)]
        found = tried(commands[command], Case(command, Place(*place), odd), good, work)
        print(json.dumps(found), file=out, flush=True)


def main() -> int:
    """Prints the table of a set; 1 if an outcome is one that may not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.places", description=__doc__)
    parser.add_argument("name", choices=SETS)
    parser.add_argument("--odd", choices=ODD, action="append")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        _child(options.name, options.folder, options.cases)
        return 0
    wrong = 0
    for case, found in outcomes(options.name, only=tuple(options.odd or ODD)):
        wrong += not found.right
        print(
            f"{'    ' if found.right else 'FELL'} {case.command:18} {case.place.path:45} "
            f"{case.place.opener:45} {case.odd:7} {found.kind:9} {found.mib:4} MiB "
            f"{found.cpu_s:4.1f} s  {found.said}",
            flush=True,
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
