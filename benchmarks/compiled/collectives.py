"""Finds what a compiled program sends between devices by reading its text."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

_BYTES = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0}
_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({_KINDS})(-start)?\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"\b(pred|bf16|f8e4m3fn|f8e5m2|[fsuc]\d+)\[([\d,]*)\]")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\))? \{([^}(]*)\}"
)
_CHAIN = re.compile(r'frontend_attributes=\{[^}]*\bchain_id="(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BOUND = re.compile(r"ROOT .* compare\((.*)\), direction=LT")
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_SOURCE = re.compile(r'\bop_name="([^"]*)"')
_LAYER = re.compile(r"\blayer_\d+\b")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Shape(NamedTuple):
    """An array in a program."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        dtype = self.dtype
        size = _BYTES[dtype] if dtype in _BYTES else int(dtype.lstrip("fsuc")) // 8
        return size * math.prod(self.dims)


class Collective(NamedTuple):
    """An instruction by which devices exchange data.

    Attributes:
      kind: all-gather, all-reduce, reduce-scatter, all-to-all or collective-permute.
      results: the arrays that each device receives.
      group: positions in the mesh of the devices of its first group; empty: all devices.
      times: how often one run of the program executes it.
      source: the names of the traced functions and scopes that it comes from; "" if the compiler
        does not say.
    """

    kind: str
    results: tuple[Shape, ...]
    group: tuple[int, ...]
    times: int
    source: str = ""

    @property
    def result_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.results)

    def sent_bytes(self, num_devices: int) -> float:
        """Bytes that a device sends in one execution, if data travels along a ring."""
        size = len(self.group) or num_devices
        if self.kind == "collective-permute":
            return self.result_bytes
        if self.kind == "reduce-scatter":
            return (size - 1) * self.result_bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (size - 1) / size * self.result_bytes


def collectives(text: str) -> list[Collective]:
    """Every collective in a compiled program's text.

    A collective in a loop counts once per iteration. The number is the compiler's, or else the
    constant that the loop's counter stays below, as of `scan`; where there is neither, it counts
    once. Those in all branches of a conditional are counted.
    """
    bodies, entry = _computations(text)
    runs: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in bodies.get(name, ()):
            inside = times * (_iterations(line, bodies) if " while(" in line else 1)
            for called in _called(line):
                visit(called, inside)

    visit(entry, 1)
    found, chains = [], set()
    for name, times in runs.items():
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                # On a TPU one collective can be split over a chain of fusions.
                if chain := _CHAIN.search(line):
                    if chain[1] in chains:
                        continue
                    chains.add(chain[1])
                found.append(_collective(match, line, times))
    return found


def sent_by_axes(
    found: Iterable[Collective], mesh: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Bytes that a device sends in one run of the program, by mesh axes and by kind.

    Args:
      found: from `collectives`.
      mesh: sizes of the mesh axes, in order. The program must be compiled for this mesh.

    Returns:
      `{"fsdp": {"all-gather": 1e6}, "data,fsdp": ...}`.
    """
    sent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    total = math.prod(mesh.values())
    for one in found:
        amount = one.times * one.sent_bytes(total)
        if amount:
            sent[",".join(axes_of_group(one.group, mesh))][one.kind] += amount
    return {axes: dict(kinds) for axes, kinds in sent.items()}


def sent_by_layers(found: Iterable[Collective], mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a device sends in one run of the program, by layer of a `LanguageModel`.

    What lies outside of the layers, and what the compiler merged over several of them without
    saying so, is under `others`.

    Args:
      found: from `collectives`.
      mesh: sizes of the mesh axes.

    Returns:
      `{"layer_0": 1e6, "layer_1": ..., "others": ...}`, in this order.
    """
    sent: dict[str, float] = defaultdict(float)
    total = math.prod(mesh.values())
    for one in found:
        layer = _LAYER.search(one.source)
        sent[layer[0] if layer else "others"] += one.times * one.sent_bytes(total)
    last = math.inf
    order = sorted(sent, key=lambda x: last if x == "others" else int(x.removeprefix("layer_")))
    return {name: sent[name] for name in order if sent[name]}


def axes_of_group(group: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the mesh axes along which the devices of a group differ; all if it is empty."""
    if not group:
        return tuple(mesh)
    strides = [math.prod(list(mesh.values())[i + 1 :]) for i in range(len(mesh))]
    places = [
        {device // stride % size for device in group}
        for stride, size in zip(strides, mesh.values(), strict=True)
    ]
    return tuple(axis for axis, seen in zip(mesh, places, strict=True) if len(seen) > 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation by name, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _iterations(line: str, bodies: Mapping[str, list[str]]) -> int:
    """How often a loop's body runs, 1 if the text does not say."""
    if trips := _TRIPS.search(line):
        return int(trips[1])
    condition = _CONDITION.search(line)
    lines = bodies.get(condition[1], []) if condition else []
    found = filter(None, map(_CONSTANT.search, lines))
    constants = {one[1]: one[2] for one in found}
    for bound in filter(None, map(_BOUND.search, lines)):
        limit = bound[1].split()[-1].lstrip("%")
        return int(constants.get(limit, 1))
    return 1


def _called(line: str) -> Iterator[str]:
    if re.search(r" (all-reduce|reduce-scatter|reduce|scatter|sort|reduce-window)[\w\-]*\(", line):
        return
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from re.findall(r"%?([\w.\-]+)", names)


def _collective(match: re.Match[str], line: str, times: int) -> Collective:
    result, kind, started = match[1], match[2], match[3]
    shapes = [
        Shape(d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _SHAPE.findall(result)
    ]
    if started and kind != "all-reduce" and result.startswith("("):
        # An asynchronous start lists its operands first, and perhaps counters after its results;
        # all-reduce lists its results alone.
        shapes = [shape for shape in shapes if not (shape.dtype == "u32" and not shape.dims)]
        shapes = shapes[len(shapes) // 2 :]
    source = _SOURCE.search(line)
    return Collective(kind, tuple(shapes), _first_group(line), times, source[1] if source else "")


def _first_group(line: str) -> tuple[int, ...]:
    """The first group of devices that exchange data; () if all devices form one group."""
    if match := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line):
        return int(match[1]), int(match[2])
    if match := re.search(r"replica_groups=\{(?:\{([\d,]*)\})?", line):
        return tuple(int(n) for n in (match[1] or "").split(",") if n)
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        dims = _numbers(match[3])
        order = _numbers(match[4]) if match[4] else list(range(len(dims)))
        return tuple(itertools.islice(_in_order(dims, order), int(match[2])))
    if match := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'([\w.]+)'=(\d+)", match[1])}
        chosen = re.findall(r"'([\w.]+)'", match[4])
        part = [size if name in chosen else 1 for name, size in sizes.items()]
        devices = list(range(math.prod(sizes.values())))
        if match[2]:
            devices = list(_in_order(_numbers(match[2]), _numbers(match[3])))
        return tuple(devices[place] for place in _corner(part, list(sizes.values())))
    raise ValueError(f"This collective writes its groups in an unknown format: {line.strip()}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _in_order(dims: list[int], order: list[int]) -> Iterator[int]:
    """Device numbers of a grid whose axes are traversed in another order."""
    for places in itertools.product(*(range(dims[axis]) for axis in order)):
        yield sum(
            place * math.prod(dims[axis + 1 :]) for place, axis in zip(places, order, strict=True)
        )


def _corner(part: list[int], dims: list[int]) -> Iterator[int]:
    """Device numbers in the first corner of a grid; `part` is the size of the corner."""
    for places in itertools.product(*(range(size) for size in part)):
        yield sum(place * math.prod(dims[i + 1 :]) for i, place in enumerate(places))
