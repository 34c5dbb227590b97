"""Accounts for a training step's time by what the program compiled for a GPU launches.

    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. \\
        python -m benchmarks.compiled.account --out account_h100.json --table account.md

compiles the steps of the paper's models, or reads their texts (`--texts`), and puts every launch in
one class: products, the short convolution, the rule's kernels, and so on. A class has its launches,
the bytes they move, the operations of products, and a modelled time for each device: the longer of
the bytes at its copy rate and the operations at its rate of products, which that device has shown.
Waiting is `launch_us` for each launch. `benchmarks.compiled.traffic` says how bytes are counted.

`--profile` names what a device measured: the `profiles.json` of `benchmarks.bring_up`, or the
JSON of `benchmarks.speed.train_step --profile`. Kernels of XLA have the same names there as in the
compiled text, those of libraries and Pallas are recognised by theirs, so each class has its
measured time beside the modelled one.

`--before` names such an account, measured, of an earlier state of the code. What a class took there
relative to its modelled time is expected again: `expected_ms` is the modelled time times that, for
each device. Classes that had no measured time are expected as modelled.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.bring_up.files import read_lines, read_object
from benchmarks.compiled.executables import Options as Compiled
from benchmarks.compiled.executables import compile_step
from benchmarks.compiled.traffic import (
    LAUNCHING,
    LIBRARY_PRODUCT,
    Instruction,
    Sizes,
    launch_of,
    program,
)
from benchmarks.machine import settings, write_result
from benchmarks.options import parse


class Rates(NamedTuple):
    """What a device has shown in `benchmarks.bring_up`."""

    copy: float
    """Bytes per second, read and written."""
    products: float
    """Operations per second of the models' bfloat16 products."""


DEVICES = {"h100": Rates(3.0e12, 725e12), "h200": Rates(4.1e12, 725e12)}
WAITING, OTHERS, UNKNOWN = "waiting", "casts, embedding, others", "not in the text"
KERNELS = (
    (r"^gated_delta", "kernels of the gated delta rule"),
    (r"^(slot_|key_scan|product_top_k|new_log|value_|mix_rms_norm)", "memories: kernels"),
    (r"conv", "short convolution, SiLU, L2 norm"),
    (r"cross_entropy|loss|logit", "head and loss, elementwise"),
    (r"norm", "RMS norms and residual"),
)
"""Classes of Pallas kernels by their names."""
_MEMORY = r"layers/memories/|fwpkm_jax/rules/|core/slots/|layers/pkm|core/targets|benchmarks/paper/"
_EMBEDDING = r"pallas_kernels/embed/"
PLACES = (
    (
        r"^(?!.*:_gradients).*(optax/|training/optimizer\.py|training/step\.py:(_update|step)\b)",
        "optimiser",
    ),
    (r"core/cross_entropy|training/losses", "head and loss, elementwise"),
    (_MEMORY, "memories: elementwise"),
    (r"pallas_kernels/gated_delta|core/recurrence/", "around the rule"),
    (r"nn/dtypes\.py", OTHERS),
    (r"layers/norms\.py.*layers/mixers/", "gated norm"),
    (r"layers/mixers/|pallas_kernels/\w*conv", "short convolution, SiLU, L2 norm"),
    (r"layers/mlp\.py", "SwiGLU"),
    (r"layers/norms\.py|core/numerics\.py", "RMS norms and residual"),
)
"""Classes of XLA's launches by where in the source they come from, innermost function first."""
PRODUCTS, MEMORY_PRODUCTS = "products", "memories: products"
SORTING = "memories: sort, grouping"
LIBRARY = (
    (r"^(nvjet|cutlass|sm\d+_xmma|cublas|gemm|void cublas|void cutlass)", PRODUCTS),
    (r"cub::|RadixSort|sort", SORTING),
    (r"^(Memset|memcpy|MemcpyD2D|Memcpy)", "copies, memory set"),
)
"""Classes of kernels that only a profile names."""


@dataclass(frozen=True, kw_only=True)
class Options(Compiled):
    """Accounts for compiled training steps."""

    out: Path | None = None  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
    """File for the JSON; None: print it."""
    table: Path | None = None
    """File for the same as tables of Markdown."""
    texts: tuple[str, ...] = ()
    """Compiled texts to read, one for each model, in place of compiling."""
    keep_texts: Path | None = None
    """Folder for the texts that were compiled."""
    profile: Path | None = None
    """JSON of a device's profile; None: no time is measured."""
    before: Path | None = None
    """JSON of an earlier account with measured times; None: no time is expected."""
    variant: str = "all"
    """Variant of `benchmarks.bring_up.variants` whose profile is taken."""
    chunk_size: int = 512
    """Tokens between two writes of a memory."""
    places: int = 8
    """Slots that a token reads."""
    width: int = 512
    """Width of a memory's rows."""
    distinct: float = 0.73
    """Share of a chunk's references that are distinct rows."""
    launch_us: float = 1.7
    """Waiting for each launch: 3.1 ms for 1,800 of them on an H200."""


class Profile(NamedTuple):
    """Every kernel of a step as name, launches and milliseconds; the step's milliseconds; where."""

    kernels: Sequence[tuple[str, float, float]]
    step_ms: float
    device: str


class Entry(NamedTuple):
    """All runs of one launch in a step."""

    name: str
    kind: str
    times: int
    bytes: float
    operations: float


def entries(text: str, sizes: Sizes) -> Iterator[Entry]:
    """Every launch of a compiled program with its class, and how often it runs."""
    computations = program(text)
    frames = Frames(text)

    def visit(name: str, times: int, turns: int) -> Iterator[Entry]:
        types = {one.name: one.type for one in computations[name]}
        for one in computations[name]:
            if one.kind in LAUNCHING:
                launch = launch_of(computations, types, one, sizes, turns)
                called = re.search(r"calls=%?([\w.\-]+)", one.rest)
                inner = computations.get(called.group(1), []) if called else []
                is_product = launch.operations > 0 or any(
                    LIBRARY_PRODUCT in x.rest for x in (one, *inner)
                )
                kind = class_of(launch.name, one, frames.of(one.rest), is_product=is_product)
                # A Pallas kernel's name stands for all of its launches.
                kernel = launch.name if launch.name != one.name else one.name
                yield Entry(kernel, kind, times, launch.bytes, launch.operations)
            elif one.kind == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.rest)
                known = re.search(r"known_trip_count\D*(\d+)", one.rest)
                assert body is not None
                inside = int(known.group(1) if known else 1)
                yield from visit(body.group(1), times * inside, inside)
            elif one.kind == "conditional":
                # One branch runs: which one, the text does not say; the first is XLA's "true".
                branch = re.search(
                    r"(?:branch_computations=\{|true_computation=)%?([\w.\-]+)", one.rest
                )
                assert branch is not None
                yield from visit(branch.group(1), times, turns)

    return visit("ENTRY", 1, 1)


class Frames:
    """Where in the source an instruction comes from, by the tables at the head of a text."""

    def __init__(self, text: str):
        files, functions, places, frames = (
            dict(re.findall(r"^(\d+) (.*)$", found.group(1), re.MULTILINE)) if found else {}
            for found in (
                re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
                for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
            )
        )
        self._where = {
            number: f"{_short(files[_field(place, 'file_name_id')])}:"
            f"{functions[_field(place, 'function_name_id')].strip(chr(34))}"
            for number, place in places.items()
        }
        self._frames = {
            number: (_field(frame, "file_location_id"), _field(frame, "parent_frame_id"))
            for number, frame in frames.items()
        }
        # The first frame has no parent. Some versions write 0 for that, others number from 1.
        self._shift = int(self._frames.get("1", ("", "0"))[1] == "1")

    def of(self, line: str) -> str:
        """`file:function < file:function ...`, innermost first; empty if the line does not say."""
        found = re.search(r"stack_frame_id=(\d+)", line)
        if found is None:
            file = re.search(r'source_file="([^"]*)"', line)
            return f"{_short(file.group(1))}:" if file else ""
        said, number = [], found.group(1)
        while number in self._frames:
            place, parent = self._frames[number]
            said.append(self._where[place])
            number = str(int(parent) - self._shift)
        return " < ".join(said)


def _field(line: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", line)
    return found.group(1) if found else "0"


def _short(file: str) -> str:
    """A path from the package on."""
    file = file.strip('"').partition("site-packages/")[2] or file.strip('"')
    found = re.search(r"(?:^|/)((?:fwpkm_jax|pallas_kernels|benchmarks)/.*)$", file)
    return found.group(1) if found else file


def class_of(kernel: str, one: Instruction, where: str, *, is_product: bool) -> str:
    """The class of a launch.

    Args:
      kernel: name of the Pallas kernel, or of the instruction.
      one: the instruction.
      where: its place in the source, as `Frames.of` says.
      is_product: whether it multiplies matrices.
    """
    if re.search(_EMBEDDING, where):
        return OTHERS  # Although it uses a kernel of the memories.
    if kernel != one.name:
        named = next((kind for name, kind in KERNELS if re.search(name, kernel)), None)
        if named is not None:
            return named
    if is_product:
        if re.search(_MEMORY, where):
            return MEMORY_PRODUCTS
        if not re.search(r"pallas_kernels/|core/recurrence/", where):
            return PRODUCTS
    if one.kind == "sort" or (re.search(_MEMORY, where) and "sort" in one.name):
        return SORTING
    return next((kind for place, kind in PLACES if re.search(place, where)), OTHERS)


def account(options: Options, text: str) -> dict[str, Any]:
    """The classes of one step with their sums and modelled times, largest first."""
    sizes = Sizes(
        tokens=options.batch * options.chunk_size,
        places=options.places,
        value=options.width,
        distinct=options.distinct,
    )
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names: dict[str, str] = {}
    for one in entries(text, sizes):
        row = kinds[one.kind]
        row["launches"] += one.times
        row["gigabytes"] += one.times * one.bytes / 1e9
        row["teraflop"] += one.times * one.operations / 1e12
        for device, rates in DEVICES.items():
            seconds = max(one.bytes / rates.copy, one.operations / rates.products)
            row[f"{device}_ms"] += one.times * 1e3 * seconds
        names[one.name] = one.kind
    launches = sum(row["launches"] for row in kinds.values())
    waiting = {f"{device}_ms": launches * options.launch_us / 1e3 for device in DEVICES}
    rows = [
        {"class": kind, **row}
        for kind, row in sorted(kinds.items(), key=lambda item: -item[1]["h100_ms"])
    ]
    rows.append({"class": WAITING, "launches": 0, "gigabytes": 0, "teraflop": 0, **waiting})
    total = {name: sum(row[name] for row in rows) for name in rows[0] if name != "class"}
    return {"rows": rows, "total": total, "names": names}


def measured(found: Mapping[str, Any], profile: Profile) -> dict[str, float]:
    """Milliseconds of each class by a device's profile; the rest of the step is waiting.

    Args:
      found: what `account` returns.
      profile: of the same code.
    """
    by_name = {re.sub(r"[.\-]", "_", name): kind for name, kind in found["names"].items()}
    times: dict[str, float] = defaultdict(float)
    for name, _, milliseconds in profile.kernels:
        times[_measured_class(name, by_name)] += milliseconds
    times[WAITING] = profile.step_ms - sum(times.values())
    return dict(times)


def _measured_class(name: str, by_name: Mapping[str, str]) -> str:
    if name in by_name:
        return by_name[name]
    kernel = re.match(r"(\w+?)_mosaic_gpu_kernel", name)
    if kernel:
        return by_name.get(kernel.group(1), UNKNOWN)
    return next((kind for one, kind in LIBRARY if re.search(one, name)), UNKNOWN)


def expected(found: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Milliseconds of each class by device, if its launches reach the share that they reached.

    Args:
      found: what `account` returns.
      before: the same of earlier code, with `measured_ms` and the device's name, `measured_on`.
    """
    device = before["measured_on"]
    factors = {
        row["class"]: row["measured_ms"] / row[f"{device}_ms"]
        for row in before["rows"]
        if row.get("measured_ms") and row[f"{device}_ms"]
    }
    times = {
        row["class"]: {one: row[f"{one}_ms"] * factors.get(row["class"], 1.0) for one in DEVICES}
        for row in found["rows"]
    }
    for row in before["rows"]:
        # What only the profile has, such as clearing of memory, stays as it was.
        if row.get("measured_ms") and not row["launches"] and row["class"] not in times:
            times[row["class"]] = dict.fromkeys(DEVICES, row["measured_ms"])
    return times


def device_of(kind: str) -> str:
    """The name in `DEVICES` of a kind of device, such as NVIDIA H200.

    Raises:
      SystemExit: there is none.
    """
    for name in DEVICES:
        if name in kind.lower():
            return name
    raise SystemExit(f"--profile: it was measured on {kind!r}; DEVICES knows {', '.join(DEVICES)}.")


def profile_of(options: Options, name: str) -> Profile | None:
    """A model's step as a device measured it, if it did."""
    if options.profile is None:
        return None
    kept = json.loads(options.profile.read_text(encoding="utf-8"))
    if "rows" in kept:
        for row in kept["rows"]:
            if row["model"] == name and "longest_kernels" in row:
                kernels = row["longest_kernels"]
                listed = [(one["name"], one["launches"], one["milliseconds"]) for one in kernels]
                share = sum(one["share"] for one in kernels)
                rest = sum(one["milliseconds"] for one in kernels) * (1 / share - 1)
                rest = ("kernels that the profile does not list", 0.0, rest)
                return Profile([*listed, rest], row["milliseconds"], kept["environment"]["device"])
        return None
    kernels = kept.get(f"{name}/{options.variant}")
    if kernels is None:
        return None
    lines = read_lines(options.profile.with_name("steps.jsonl"))
    for row in lines:
        if (row["model"], row["variant"]) == (name, options.variant) and "milliseconds" in row:
            return Profile([tuple(one) for one in kernels], row["milliseconds"], row["device"])
    raise SystemExit(f"--profile {options.profile}: beside it, no steps.jsonl has {name}'s step.")


def table_of(name: str, found: Mapping[str, Any]) -> str:
    """The account of a model as a table of Markdown."""
    times = {f"{one}_ms": f"{one.upper()}, ms" for one in DEVICES}
    if "expected_h100_ms" in found["total"]:  # At most six columns.
        times = {f"expected_{one}_ms": f"{one.upper()} expected, ms" for one in DEVICES}
    elif "measured_on" in found:
        device = found["measured_on"]
        times = {f"{device}_ms": f"{device.upper()}, ms", "measured_ms": "measured, ms"}
    head = [f"`{name}`", "launches", "GB", "TFLOP", *times.values()]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in [*found["rows"], {"class": "all", **found["total"]}]:
        cells = [row["class"], f"{row['launches']:,.0f}", f"{row['gigabytes']:.1f}"]
        cells += [f"{row['teraflop']:.2f}" if row["teraflop"] >= 0.005 else ""]
        cells += [f"{row[time]:.1f}" if time in row else "" for time in times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    if options.texts and len(options.texts) != len(options.models):
        raise SystemExit(
            f"--texts: {len(options.texts)} files for {len(options.models)} models; name one each."
        )
    jax.config.update("jax_traceback_in_locations_limit", 30)  # Whole paths in the text.
    given = settings(options)
    del given["texts"]  # Paths.
    result: dict[str, Any] = {"jax": jax.__version__, "options": given, "models": {}}
    tables = []
    for index, name in enumerate(options.models):
        if options.texts:
            text = Path(options.texts[index]).read_text(encoding="utf-8")
        else:
            text = compile_step(options, name).as_text()
            if options.keep_texts is not None:
                options.keep_texts.mkdir(parents=True, exist_ok=True)
                (options.keep_texts / f"{name}.hlo").write_text(text, encoding="utf-8")
        found = account(options, text)
        profile = profile_of(options, name)
        if profile is not None:
            times = measured(found, profile)
            found["measured_on"] = device_of(profile.device)
            for row in found["rows"]:
                row["measured_ms"] = times.pop(row["class"], 0.0)
            zero = dict.fromkeys(found["total"], 0.0)
            found["rows"] += [
                {"class": kind, **zero, "measured_ms": time_} for kind, time_ in times.items()
            ]
            found["total"]["measured_ms"] = sum(row["measured_ms"] for row in found["rows"])
        if options.before is not None:
            before = read_object(options.before).get("models", {}).get(name)
            if before is None:
                raise SystemExit(f"--before {options.before}: it has no account of {name}.")
            times_of = expected(found, before)
            known = {row["class"] for row in found["rows"]}
            zero = dict.fromkeys(found["total"], 0.0)
            found["rows"] += [{"class": kind, **zero} for kind in times_of if kind not in known]
            for row in found["rows"]:
                row |= {f"expected_{one}_ms": t for one, t in times_of[row["class"]].items()}
            for one in DEVICES:
                sums = sum(row[f"expected_{one}_ms"] for row in found["rows"])
                found["total"][f"expected_{one}_ms"] = sums
        del found["names"]
        result["models"][name] = found
        tables.append(table_of(name, found))
        print(tables[-1], file=sys.stderr, flush=True)
        if options.table is not None:
            options.table.write_text("\n".join(tables), encoding="utf-8")
    write_result(result, options.out)


if __name__ == "__main__":
    main()
