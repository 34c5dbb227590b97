"""What is done to good files: bytes, JSON values, headers of tensors, pickles."""

from __future__ import annotations

import json
import pickletools
import random
import struct
from typing import Any

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -8, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**53),
    *(2**62, 2**63, 2**64, -(2**31), -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e38, 1e300, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "a", "../x", "/etc/passwd", "\0", "\x1b[31m", "\ud800", "a" * 5000, "F32", "1e999", "*"),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3], [0] * 100, {"class": "X"}, ["a", 1, None]),
)
_BYTES = (b"\0", b"\xff", b"\x7f", b"\x80", b"{", b"[", b'"', b"]", b"}", b"\n", b",", b"9", b"-")
_OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]


def of_bytes(content: bytes, rng: random.Random) -> bytes:
    """A file of the same kind with some bytes changed, lost, added or repeated."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 3:
            data[at:at] = rng.choice(_BYTES) * rng.choice((1, 1, 8, 1000))
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 5:
            start = rng.randrange(len(data) + 1)
            data[at:at] = data[start : start + rng.randrange(1, 200)]
        else:
            number = rng.choice((0, 1, 2**16, 2**31, 2**32, 2**63, 2**64 - 1))
            data[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
    return bytes(data)


def of_json(content: bytes, rng: random.Random) -> bytes:
    """A JSON text with values, names or depths that it should not have."""
    if rng.random() < 0.2:
        return of_bytes(content, rng)
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        value = _changed(value, rng)
    text = json.dumps(value, allow_nan=True)
    if rng.random() < 0.05:
        text = text.replace('"', rng.choice(("'", '""', "")), 3)
    if rng.random() < 0.03:
        deep = rng.choice((50, 120, 3000, 100_000))
        text = text.replace(":", ":" + "[" * deep, 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, rng: random.Random) -> Any:
    """A value, one place of which is changed; every place is as likely as every other one."""
    places: list[tuple[Any, Any]] = []
    level = [value] if isinstance(value, dict | list) else []
    while level:
        inner = level.pop()
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key))
            if isinstance(inner[key], dict | list):
                level.append(inner[key])
    if not places or rng.random() < 0.02:
        return _copied(rng.choice(HOSTILE))
    inner, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, dict):
        name = rng.choice(("", "x", "class", "__metadata__", str(key) + "x", "\0"))
        inner[name] = inner.pop(key)
    elif kind == 2:
        other, place = rng.choice(places)
        inner[key] = _copied(other.get(place) if isinstance(other, dict) else None)
    elif kind == 3 and isinstance(inner, list):
        inner *= rng.choice((0, 2, 50))
    elif kind == 4 and type(inner[key]) in (int, float) and abs(inner[key]) < 1e300:
        inner[key] = rng.choice(
            (-inner[key], inner[key] + 1, inner[key] * 1000, -1, str(inner[key]))
        )
    elif kind == 5:
        nested: Any = inner[key]
        for _ in range(rng.choice((1, 3, 90, 110))):
            nested = rng.choice(([nested], {"a": nested}))
        inner[key] = nested
    else:
        inner[key] = _copied(rng.choice(HOSTILE))
    return value


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))  # Deeper than copy.deepcopy can go.


def of_lines(content: bytes, rng: random.Random) -> bytes:
    """A file of JSON or number lines, some of which are changed."""
    lines = content.split(b"\n")
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(lines))
        try:
            lines[at] = of_json(lines[at], rng)
        except (ValueError, RecursionError):
            lines[at] = of_bytes(lines[at], rng)
    return b"\n".join(lines) if rng.random() < 0.8 else of_bytes(content, rng)


def of_numbers(content: bytes, rng: random.Random) -> bytes:
    """A file of lines of numbers, some of which are others."""
    if rng.random() < 0.3:
        return of_bytes(content, rng)
    lines = [line.split() for line in content.split(b"\n")]
    for _ in range(rng.choice((1, 2, 5))):
        line = rng.choice(lines)
        if line:
            number = rng.choice((0, 1, -1, 2**31, 2**62, 2**63, 2**64, 10**25, b"x", b"1e5", b"+1"))
            line[rng.randrange(len(line))] = number if isinstance(number, bytes) else b"%d" % number
    return b"\n".join(b" ".join(line) for line in lines)


def of_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header or tensors are changed, often with the right length."""
    if rng.random() < 0.25:
        return of_bytes(content, rng)
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = rng.random()
    if kind < 0.65:
        header = of_json(header, rng)
    elif kind < 0.85:
        values = json.loads(header)
        names = [name for name in values if name != "__metadata__"] or ["__metadata__"]
        entry = values[rng.choice(names)]
        entry |= {"data_offsets": entry.get("data_offsets", [0, 0])}
        entry |= {"shape": entry.get("shape", [])}
        which = rng.randrange(5)
        if which == 0:
            entry["data_offsets"] = list(values[rng.choice(names)].get("data_offsets", [0, 8]))
        elif which == 1:
            shift = rng.choice((-8, -4, 1, 4, 8, 2**32, -(2**40)))
            entry["data_offsets"] = [x + shift for x in entry["data_offsets"]]
        elif which == 2:
            entry["shape"] = [*entry["shape"], *rng.choice(([0], [1], [1] * 70, [2**62], [-1, -1]))]
        elif which == 3:
            entry["dtype"] = rng.choice(("F64", "F8_E4M3", "I4", "BOOL", "C64", "f32", "", "F16"))
        else:
            values[rng.choice(("x", "a.b", "model.norm.weight"))] = _copied(entry)
        header = json.dumps(values).encode()
    else:
        data = of_bytes(data, rng)
    if rng.random() < 0.1:
        data += rng.randbytes(rng.choice((1, 8, 1000)))
    length = len(header) if rng.random() < 0.95 else rng.choice((0, 1, 2**24, 2**32, 2**63))
    return struct.pack("<Q", length) + header + data
