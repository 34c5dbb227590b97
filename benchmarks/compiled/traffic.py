"""Bytes and operations of every launch of a compiled program, as its text states them.

A launch moves its operands and results. Of an array that it only slices, gathers from or updates in
place, it moves that part. XLA's text does not say which rows a Pallas kernel moves; `KERNELS` does.
Of an array with a part for each turn of the loop, a Pallas kernel moves one part. Caches are not
modelled: what one launch writes, the next one reads from memory.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?)\s([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
LAUNCHING = (
    *("fusion", "fusion-start", "custom-call", "copy", "copy-start"),
    *("sort", "dot", "gather", "scatter"),
)
LIBRARY_PRODUCT = 'custom_call_target="__cublas'
"""What the line of a product by cuBLAS says."""
_SAME = ("bitcast", "reshape", "copy", "convert", "get-tuple-element", "transpose")


class Rows(NamedTuple):
    """How often a kernel moves the distinct rows of a chunk, out of tables and logs."""

    read: int
    written: int


KERNELS = {
    "slot_read": Rows(1, 0),
    "slot_read_error": Rows(1, 0),
    "slot_dot": Rows(1, 0),
    "slot_back": Rows(2, 0),
    "new_log": Rows(0, 0),
    "slot_add_segments": Rows(0, 0),
    "slot_add": Rows(1, 1),
    "slot_add into a log": Rows(1, 2),
}
"""Other kernels move all of their operands and results."""


@dataclass(frozen=True)
class Sizes:
    """What the text does not say.

    Attributes:
      tokens: of a chunk.
      places: of a token.
      value: width of a row.
      distinct: share of a chunk's references that are distinct rows.
    """

    tokens: int
    places: int
    value: int
    distinct: float

    @property
    def row_bytes(self) -> float:
        """Bytes of a chunk's distinct rows."""
        return 4.0 * self.value * self.tokens * self.places * self.distinct


class Launch(NamedTuple):
    """One launch.

    Attributes:
      name: of the instruction; for a Pallas kernel, the kernel's.
      bytes: read and written.
      operations: of products, each multiplication and each addition; of all bfloat16 parts.
    """

    name: str
    bytes: float
    operations: float


class Instruction(NamedTuple):
    """One line of a compiled program."""

    root: bool
    name: str
    type: str
    kind: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth, end = 1, 0
        for end, sign in enumerate(self.rest):  # noqa: B007
            depth += (sign == "(") - (sign == ")")
            if not depth:
                break
        return re.findall(r"%([\w.\-]+)", self.rest[:end])


def program(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation; that of the entry is also called `ENTRY`."""
    heads = list(COMPUTATION.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found = {}
    for head, end in zip(heads, ends, strict=True):
        lines = (_INSTRUCTION.match(line) for line in text[head.end() : end].splitlines())
        parts = [Instruction(bool(m[1]), m[2], _type(m), m[4], m[5]) for m in lines if m]
        found[head.group(1)] = parts
        if head.group().startswith("ENTRY"):
            found["ENTRY"] = parts
    return found


def _type(line: re.Match[str]) -> str:
    """The type of a result; of a product by a library without its workspace."""
    is_product = LIBRARY_PRODUCT in line[5]
    return re.sub(r",\s*s8\[\d+\]\S*(?=\))", "", line[3]) if is_product else line[3]


def launches(text: str, sizes: Sizes) -> dict[str, tuple[int, list[Launch]]]:
    """For the entry and each loop that it runs: how often, and the launches of one turn."""
    computations = program(text)
    found = {}

    def visit(name: str, times: int, turns: int) -> None:
        _, before = found.get(name, (0, []))
        found[name] = (times, before or list(_launches_of(computations, name, sizes, turns)))
        for one in computations[name]:
            if one.kind == "while":
                body = re.search(r"body=%?([\w.\-]+)", one.rest)
                known = re.search(r"known_trip_count\D*(\d+)", one.rest)
                assert body is not None
                turns = int(known.group(1) if known else 1)
                visit(body.group(1), times * turns, turns)

    visit("ENTRY", 1, 1)
    return found


def _launches_of(computations, name: str, sizes: Sizes, turns: int) -> Iterator[Launch]:
    types = {one.name: one.type for one in computations[name]}
    for one in computations[name]:
        if one.kind in LAUNCHING:
            yield launch_of(computations, types, one, sizes, turns)


def launch_of(
    computations: Mapping[str, list[Instruction]],
    types: Mapping[str, str],
    one: Instruction,
    sizes: Sizes,
    turns: int,
) -> Launch:
    """The bytes and operations of one instruction that launches something.

    Args:
      computations: the `program`.
      types: of the instructions of its computation, by name.
      one: the instruction.
      sizes: what the text does not say.
      turns: of the loop in which it is; 1 outside.
    """
    called = re.search(r"calls=%?([\w.\-]+)", one.rest)
    inner = computations.get(called.group(1), []) if called else []
    kernel = next((k for k in map(_kernel, [one, *inner]) if k), None)
    if inner:
        moved = _fusion_bytes(inner, kernel, sizes, turns)
    else:
        arrays = [types[x] for x in one.operands if x in types] + [one.type]
        moved = sum(_array_bytes(x, kernel, sizes, turns) for x in arrays)
    label = kernel or one.name
    if kernel == "slot_add" and _tables([one, *inner], sizes.tokens * sizes.places) > 1:
        label = "slot_add into a log"
    seen = [types.get(x, "") for x in one.operands] + [x.type for x in (one, *inner)]
    widths = {_shape(array)[-1:] for type_ in seen for array in _ARRAY.finditer(type_)}
    if label in KERNELS and (sizes.value,) in widths:  # Tables of other widths are counted whole.
        moved += sum(KERNELS[label]) * sizes.row_bytes
    operations = sum(map(functools.partial(_operations, inner), inner))
    products = [x for x in (one, *inner) if LIBRARY_PRODUCT in x.rest]
    types = {**types, **{x.name: x.type for x in inner}}
    operations += sum(_library_operations(types, x) for x in products)
    return Launch(label, moved, operations)


def _library_operations(types: Mapping[str, str], one: Instruction) -> float:
    """Of a product of cuBLAS."""
    left = _ARRAY.search(types.get(one.operands[0], ""))
    result = _ARRAY.search(one.type)
    axes = re.search(r'lhs_contracting_dimensions":\["?([\d",]+)\]', one.rest)
    if left is None or result is None or axes is None:
        return 0.0
    depth = math.prod(_shape(left)[int(axis)] for axis in re.findall(r"\d+", axes.group(1)))
    return 2.0 * math.prod(_shape(result)) * depth


def _kernel(one: Instruction) -> str | None:
    if one.kind != "custom-call" or "mosaic_gpu" not in one.rest:
        return None
    found = re.search(r'op_name="[^"]*?[/(](\w+)\)*/mpmd_map"', one.rest)
    return found.group(1) if found else "kernel"


def _tables(parts: list[Instruction], references: int) -> int:
    """How many tables and logs a kernel writes."""
    calls = [one for one in parts if one.kind == "custom-call"]
    return max(
        sum(len(_shape(m)) == 2 and _shape(m)[0] >= references for m in _ARRAY.finditer(one.type))
        for one in calls
    )


def _shape(array: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(size) for size in array.group(2).split(",") if size)


def _array_bytes(type_: str, kernel: str | None, sizes: Sizes, turns: int) -> float:
    """Bytes of all arrays of a type; of a row kernel without tables, logs and partial sums."""
    total = 0.0
    for array in _ARRAY.finditer(type_):
        shape, bits = _shape(array), int(re.sub(r"\D", "", array.group(1)) or 8)
        # Some have a part more, for what comes before the first turn or after the last.
        if kernel and len(shape) > 1 and shape[0] in (turns, turns + 1):
            shape = shape[1:]
        by_rows = shape and shape[-1] == sizes.value and len(shape) > 1
        tokens = by_rows and math.prod(shape[:-1]) == sizes.tokens
        if kernel in KERNELS and by_rows and not tokens:
            continue
        total += math.prod(shape) * bits / 8
    return total


def _fusion_bytes(inner: list[Instruction], kernel: str | None, sizes: Sizes, turns: int) -> float:
    by_name = {one.name: one for one in inner}
    users: dict[str, list[Instruction]] = {one.name: [] for one in inner}
    for one in inner:
        for operand in one.operands:
            if operand in users:
                users[operand].append(one)

    def read(name: str, type_: str) -> float:
        """Bytes of an operand that its users need."""
        whole = _array_bytes(type_, kernel, sizes, turns)
        total = 0.0
        for user in users[name]:
            if user.kind in ("dynamic-slice", "slice") or (
                user.kind == "gather" and user.operands[0] == name
            ):
                total += _array_bytes(user.type, None, sizes, turns)
            elif user.kind in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                continue  # In place; what is written is counted at the result.
            elif user.kind in _SAME:
                total += read(user.name, user.type)
            else:
                return whole
        return min(total, whole)

    def written(one: Instruction) -> float:
        if one.kind == "dynamic-update-slice":
            return _array_bytes(by_name[one.operands[1]].type, kernel, sizes, turns)
        if one.kind == "scatter":
            return 2 * _array_bytes(by_name[one.operands[-1]].type, kernel, sizes, turns)
        if one.kind == "tuple":
            return sum(written(by_name[x]) for x in one.operands)
        if one.kind in _SAME and one.operands and one.operands[0] in by_name:
            source = by_name[one.operands[0]]
            if source.kind in (*_SAME, "dynamic-update-slice", "scatter"):
                return written(source)
        return _array_bytes(one.type, kernel, sizes, turns)

    moved = sum(read(one.name, one.type) for one in inner if one.kind == "parameter")
    return moved + sum(written(one) for one in inner if one.root)


def _operations(inner: list[Instruction], one: Instruction) -> float:
    """Of a product; a product of float32 in three bfloat16 parts counts three times."""
    if one.kind != "dot":
        return 0.0
    types = {other.name: other.type for other in inner}
    left = _ARRAY.search(types[one.operands[0]])
    result = _ARRAY.search(one.type)
    axes = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", one.rest)
    assert left is not None
    assert result is not None
    assert axes is not None
    depth = math.prod(_shape(left)[int(axis)] for axis in axes.group(1).split(","))
    parts = re.search(r"_x(\d)", one.rest)
    return 2.0 * math.prod(_shape(result)) * depth * (int(parts.group(1)) if parts else 1)
