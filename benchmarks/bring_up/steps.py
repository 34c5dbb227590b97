"""Times variants of the training step: compiled side by side, timed one after the other.

    python -m benchmarks.bring_up.steps --out steps.jsonl --profiles profiles.json

Each variant of each model is a process of its own. All compile at the same time, at most `--jobs`
of them, into the compilation cache that JAX_COMPILATION_CACHE_DIR names; then each in turn is told
to run, alone on the device, with its steps queued as a training loop queues them. One line of JSON
for each is written as it comes: milliseconds per step, samples per second, the loss after the same
number of steps, peak memory, and every choice of a kernel with its reason. Lines that the file has,
of the same source and kind of device, are not measured again. The program that makes a model's
first state is compiled once and loaded by all variants.

Kernels are chosen by shape and dtype without the check before first use: the comparisons of
`correctness` make that check, beside these compilations. `--wait-for` names a file; timing begins
when it exists.
"""

import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks import processes
from benchmarks.bring_up import sources
from benchmarks.bring_up.files import read_lines, read_object
from benchmarks.bring_up.variants import KNOWN, Variant, first_variants, variants
from benchmarks.options import from_json, parse, to_json

MODULE = "benchmarks.bring_up.steps"
ENDING = ".exe.xz"
LARGEST_FILE = 2**24
"""Bytes of a file that comes back from a lent machine."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times the variants of `variants.py` that are not measured."""

    out: Path
    """File for the lines."""
    profiles: Path | None = None
    """File for the kernels of each profiled step; None: no profiles."""
    size: Literal["tiny", "paper"] = "paper"
    """tiny: 4 narrow layers; paper: the paper's widths."""
    models: tuple[str, ...] = ("gdn", "gdn__fwpkm2_6_10")
    """The paper's models by name."""
    variants: tuple[str, ...] = ()
    """Names of the variants; none: all."""
    operations: tuple[str, ...] | None = None
    """Operations to leave out in turn; None: those for which the models choose a kernel, besides
    the ones in `variants.KNOWN`."""
    executables: Path | None = None
    """Folder of `benchmarks.compiled.executables`; None: no executable was made elsewhere."""
    keep: Path | None = None
    """Folder for the executables of the profiled variants, to load them next time; None: none."""
    device: str | None = None
    """Kind of this machine's device: lines of another one are measured again; None: any counts."""
    batch: int = 8
    """Sequences per step."""
    length: int | None = None
    """Tokens per sequence; None: 4096 (tiny: 256)."""
    steps: int = 10
    """Steps that are queued and timed together."""
    blocks: int = 3
    """Times that so many steps are timed; the median is reported."""
    jobs: int = 8
    """Variants that compile at the same time."""
    compile_s: float = 240
    """Seconds for a variant to compile."""
    run_s: float = 60
    """Seconds for a variant to run."""
    seconds: float = 400
    """No variant is started after so many seconds."""
    wait_for: Path | None = None
    """Timing begins when this file exists; None: at once."""


def key_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["variant"]


class _Pending:
    """One variant of one model, compiling in its process."""

    def __init__(self, options: Options, model: str, variant: Variant, module: str, states: Path):
        self.options, self.model, self.variant, self.module = options, model, variant, module
        self.states = states
        self.row: dict[str, Any] = {"model": model, "variant": variant.name}
        self.row |= {"reference": list(variant.reference), "flags": variant.flags}
        self._talk: processes.Conversation | None = None

    def compile(self, stop: float) -> None:
        began = time.monotonic()
        if began > stop:
            self.row["failed"] = "not started: the time was over"
            return
        added = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {self.variant.flags}".strip()}
        if self.variant.reference:
            before = os.environ.get("PALLAS_KERNELS_REFERENCE", "")
            names = [name for name in before.split(",") if name]
            added["PALLAS_KERNELS_REFERENCE"] = ",".join([*names, *self.variant.reference])
        task: dict[str, Any] = {"options": to_json(self.options), "model": self.model}
        task |= {"variant": asdict(self.variant), "states": str(self.states)}
        self._talk = processes.Conversation.of(self.module, task, variables=added)
        self.row |= self._talk.hear(min(self.options.compile_s, stop - began))
        self.row["ready_seconds"] = time.monotonic() - began

    def run(self, stop: float) -> dict[str, Any]:
        """The whole row; the process has ended then."""
        if self._talk is not None and "failed" not in self.row:
            limit = min(self.options.run_s, stop - time.monotonic())
            if limit <= 0:
                self.row["failed"] = "not timed: the time was over"
            else:
                self._talk.tell()
                self.row |= self._talk.hear(limit)
            if self.variant.profiled and "failed" not in self.row:
                self._look_closer(stop)
        self.end()
        return self.row

    def _look_closer(self, stop: float) -> None:
        """Adds the profile and the comparison of bits; the times stay if one of them fails."""
        assert self._talk is not None
        for what in ("profile", "determinism"):
            limit = min(self.options.run_s, stop - time.monotonic())
            if limit <= 0:
                self.row[f"{what}_failed"] = "not started: the time was over"
                return
            self._talk.tell()
            found = self._talk.hear(limit)
            if "failed" in found:
                self.row[f"{what}_failed"] = found["failed"]
                return
            self.row |= found

    def end(self) -> None:
        if self._talk is not None:
            self._talk.end()


def run_variants(options: Options, *, module: str = MODULE) -> list[dict[str, Any]]:
    """The rows of all variants, of which those that the file lacks are measured."""
    start = time.monotonic()
    stop = start + options.seconds
    source = sources.of_step()
    kept = [
        row
        for row in read_lines(options.out)
        if "failed" not in row and sources.is_measured(row, source, options.device)
    ]
    options.out.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
    rows = {key_of(row): row for row in kept}
    profiles = read_object(options.profiles) if options.profiles else {}
    profiles = {name: profile for name, profile in profiles.items() if _of_rows(name, rows)}
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        states = Path(folder)
        pending: list[_Pending] = []

        def add(found: Sequence[Variant]) -> None:
            for variant in found:
                for model in options.models:
                    wanted = not options.variants or variant.name in options.variants
                    if not wanted or (model, variant.name) in rows:
                        continue
                    if model not in {one.model for one in pending}:
                        waiting.append(pool.submit(_make_state, options, model, module, states))
                    pending.append(_Pending(options, model, variant, module, states))
                    waiting.append(pool.submit(pending[-1].compile, stop))

        waiting: list[Any] = []
        carried = options.executables is not None
        first = first_variants(carried=carried)
        add(first)
        try:
            operations = options.operations
            if operations is None:
                operations = _operations(options, module)
            add([one for one in variants(operations, carried=carried) if one not in first])
            for one in waiting:
                one.result()
            while options.wait_for is not None and not options.wait_for.exists():
                if time.monotonic() > stop:
                    break
                time.sleep(0.1)
            for one in pending:
                row = one.run(stop) | {"source": source}
                profile = row.pop("kernels", None)
                rows[key_of(row)] = row
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                if profile is not None and options.profiles is not None:
                    profiles[f"{row['model']}/{row['variant']}"] = profile
                    _write(options.profiles, profiles)
                print(line_of(row), flush=True)
        finally:
            for one in pending:
                one.end()
    return list(rows.values())


def _make_state(options: Options, model: str, module: str, states: Path) -> None:
    """Compiles what makes a model's first state into a file, for all of its variants."""
    task = {"options": to_json(options), "state_of": model, "states": str(states)}
    found = processes.run_worker(module, task, limit_s=options.compile_s)
    if "failed" in found:
        print(f"state of {model}: {found['failed']}; each variant compiles it.", flush=True)


def _of_rows(name: str, rows: dict[tuple[str, str], Any]) -> bool:
    model, _, variant = name.partition("/")
    return (model, variant) in rows


def _write(path: Path, profiles: dict[str, Any]) -> None:
    """Writes the profiles, each kernel as name, launches and milliseconds of a step."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(profiles, separators=(",", ":")) + "\n", encoding="utf-8")
    partial.replace(path)


def _operations(options: Options, module: str) -> tuple[str, ...]:
    """The operations that have a kernel in the models and are not known yet."""
    task = {"options": to_json(options)}
    # Beside the processes that own the device; only traced.
    found = processes.run_worker(
        module, task, variables={"JAX_PLATFORMS": "cpu"}, limit_s=options.compile_s
    )
    if "failed" in found:
        print(f"operations: {found['failed']}; no variant leaves one out.", flush=True)
    return tuple(op for op in found.get("operations", ()) if op not in KNOWN)


def line_of(row: dict[str, Any]) -> str:
    """What a person reads about a variant."""
    said = f"{row['model']} {row['variant']}: "
    if "failed" in row:
        return f"{said}failed, {row['failed']}"
    said += f"{row['milliseconds']:.2f} ms, {row['samples_per_second']:.1f} samples/s"
    for what in ("profile", "determinism"):
        if f"{what}_failed" in row:
            said += f", {what} failed, {row[f'{what}_failed']}"
    if "differing" in row:
        said += ", equal bits twice" if not row["differing"] else ", NOT the same bits twice"
    return f"{said}, loss {row['final_loss']:.4f} after {row['steps']} steps"


# What follows runs in the variants' own processes, which load jax.


def work(task: dict[str, Any]) -> dict[str, Any]:
    """Compiles a model's first state (`state_of`), or finds the operations that have a kernel."""
    if "state_of" in task:
        return _compile_state(from_json(Options, task["options"]), task)
    return _traced_operations(task)


def _compile_state(options: Options, task: dict[str, Any]) -> dict[str, Any]:
    """Writes the compiled function that makes a model's first state."""
    import jax

    from benchmarks.compiled import executables
    from benchmarks.speed import train_step
    from benchmarks.speed.models import model_of

    began = time.perf_counter()
    model, path = task["state_of"], Path(task["states"], f"{task['state_of']}{ENDING}")
    loss_block = train_step.Options().loss_block
    _, start = train_step.make_step(loss_block, model, model_of(model, options.size))
    partial = path.with_suffix(".partial")
    executables.write(partial, jax.jit(start).lower().compile())
    partial.replace(path)
    return {"state_seconds": time.perf_counter() - began}


def _state_of(start: Callable[[], Any], path: Path) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What makes a first state: the file's compiled function, or one compiled here without it."""
    import jax

    from benchmarks.compiled import executables

    began, facts = time.perf_counter(), {}
    try:
        made, _ = executables.load(path)
    except Exception as error:  # Without the file the step is timed all the same.
        facts["state_compiled"] = f"{type(error).__name__}: {error}"[:300]
        made = jax.jit(start).lower().compile()
    return made, {"state_seconds": time.perf_counter() - began, **facts}


def _traced_operations(task: dict[str, Any]) -> dict[str, Any]:
    """The operations for which the models choose a kernel, by tracing their first layers."""
    import jax
    import jax.numpy as jnp

    from benchmarks.compiled.absent_devices import kernels_for
    from benchmarks.speed.models import model_of
    from benchmarks.speed.train_step import make_step
    from pallas_kernels import dispatch

    options = from_json(Options, task["options"])
    for name in options.models:
        with kernels_for("h100"):
            step, make_state = make_step(2048, name, model_of(name, "paper", layers=3))
            batch = {
                "tokens": jax.ShapeDtypeStruct((1, 4097), jnp.int32),
                "loss_weight": jax.ShapeDtypeStruct((1, 4096), jnp.float32),
            }
            step.trace(jax.eval_shape(make_state), batch)
    return {"operations": sorted({op for op, how, _ in dispatch.decisions if how == "gpu"})}


def talk(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Compiles or loads a variant's step; then, when told to, runs it and yields its times."""
    import jax

    from benchmarks.machine import peak_device_megabytes, planned_megabytes
    from benchmarks.speed import train_step
    from benchmarks.speed.models import model_of

    options = from_json(Options, task["options"])
    variant = Variant(**task["variant"])
    model = model_of(task["model"], options.size)
    of_batch = train_step.Options(
        size=options.size,
        batch=options.batch,
        length=options.length,
    )
    step, start = train_step.make_step(of_batch.loss_block, task["model"], model)
    batch = train_step.random_batch(of_batch, model)
    began = time.perf_counter()
    if variant.carried:
        from benchmarks.compiled import executables

        assert options.executables is not None
        compiled, facts = executables.load(options.executables / f"{task['model']}{ENDING}")
        ready: dict[str, Any] = {"load_seconds": time.perf_counter() - began, "facts": facts}
        ready["of_this_source"] = facts.get("source") == sources.of_step()
    else:
        with _kernels():
            lowered = step.lower(jax.eval_shape(start), batch)
            lower_seconds = time.perf_counter() - began
            compiled = lowered.compile()
        ready = {
            "lower_seconds": lower_seconds,
            "compile_seconds": time.perf_counter() - began - lower_seconds,
            "planned_megabytes": planned_megabytes(compiled),
            "implementations": train_step.implementations(),
        }
        if variant.profiled and options.keep is not None:
            ready |= _keep(options.keep / f"{task['model']}{ENDING}", compiled, task)
    yield {"device": jax.devices()[0].device_kind, **ready}

    make_state, made = _state_of(start, Path(task["states"], f"{task['model']}{ENDING}"))
    batch = jax.block_until_ready(batch)
    holder: dict[str, Any] = {"state": make_state()}

    def call() -> jax.Array:
        holder["state"], metrics = compiled(holder["state"], batch)
        return metrics["loss"]

    def queued(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        for _ in range(number - 1):
            call()
        loss = jax.block_until_ready(call())
        return time.perf_counter() - began, float(loss)

    first = queued(1)[1]
    queued(min(3, options.steps))
    blocks = [queued(options.steps) for _ in range(options.blocks)]
    seconds = [time_ / options.steps for time_, _ in blocks]
    median = statistics.median(seconds)
    yield {
        **made,
        "milliseconds": 1e3 * median,
        "milliseconds_spread": 1e3 * (max(seconds) - min(seconds)),
        "block_milliseconds": [1e3 * one for one in seconds],
        "samples_per_second": options.batch / median,
        "tokens_per_second": batch["loss_weight"].size / median,
        "first_loss": first,
        "final_loss": blocks[-1][1],
        "steps": 1 + min(3, options.steps) + options.steps * options.blocks,
        "peak_device_megabytes": peak_device_megabytes(),
    }
    if not variant.profiled:
        return
    from benchmarks.speed.longest_kernels import longest_kernels

    kernels = longest_kernels(call, number=None)
    del holder["state"]
    yield {
        "kernels": [
            [one["name"], one["launches"], round(one["milliseconds"], 6)] for one in kernels
        ],
        "kernel_milliseconds": sum(one["milliseconds"] for one in kernels),
        "launches": sum(one["launches"] for one in kernels),
    }
    yield {"differing": differing(make_state, compiled, batch)}


def _keep(path: Path, compiled: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Writes the executable; its size, or why it was not kept, which costs no measurement."""
    import jax

    from benchmarks.compiled import executables

    facts = {"jax": jax.__version__, "source": sources.of_step(), "variant": task["variant"]}
    try:
        size = executables.write(path, compiled, model=task["model"], **facts)
    except Exception as error:
        return {"not_kept": f"{type(error).__name__}: {error}"[:300]}
    if size > LARGEST_FILE:
        path.unlink()
        return {"not_kept": f"{size / 1e6:.1f} MB, more than {LARGEST_FILE / 1e6:.1f}"}
    return {"kept_megabytes": size / 1e6}


def _kernels() -> AbstractContextManager[None]:
    """Traces this device's kernels without a check before their first use."""
    import jax

    from pallas_kernels import dispatch

    if jax.default_backend() == "gpu":
        return dispatch.compile_kernels("gpu")
    return nullcontext()


def differing(make_state: Callable[[], Any], step: Callable[..., Any], batch: Any) -> list[str]:
    """The arrays whose bits differ after two steps from the same start, done twice."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def bits() -> dict[str, bytes]:
        state, _ = step(make_state(), batch)
        leaves = jax.tree_util.tree_leaves_with_path(step(state, batch))
        return {jax.tree_util.keystr(path): bits_of(array) for path, array in leaves}

    def bits_of(array: jax.Array) -> bytes:
        is_rng = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        raw = np.asarray(jax.random.key_data(array) if is_rng else array)
        return hashlib.sha256(raw.tobytes()).digest()

    one = bits()
    return [name for name, found in bits().items() if found != one[name]]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(Options, argv, description=__doc__)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = run_variants(options)
    failed = [row for row in rows if "failed" in row]
    for row in failed:
        print(line_of(row), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
