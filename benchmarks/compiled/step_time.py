"""States what a memory costs a training step, by a model of time over the code compiled for a GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=build/cuda:. python -m benchmarks.compiled.step_time

compiles FwPKM's forward and backward pass as `benchmarks.compiled.launches` does, and takes the
bytes and operations of each launch from the text (`benchmarks.compiled.traffic`). A launch takes
`launch_us`, and the longer of its bytes at the bandwidth and its operations at the rate of
products. No launch overlaps another, and nothing stays in a cache. The layer's projections are
added by formula. The backbone's time is given; the paper's is 147 ms for 8 sequences on an H100.
With 7 or 8 chunks the 8 parts of the sums of `key_scan_add` look like those of 8 turns, and 7 of
them are not counted: 7 MB too few written, and read, by each loop of the keys.

`rows` has a row per loop and one for what runs once per sequence, `ratio` the speed of the step
with memories relative to the one without, by backbone.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.compiled.launches import Passes, compiled_text
from benchmarks.compiled.traffic import Launch, Sizes, launches
from benchmarks.machine import settings, write_result
from benchmarks.options import parse

_PLACES = 8  # Slots that a token reads, the default of the rule.
_SELECT = "product_top_k_select"
_PARTS = {_SELECT: 6, "key_scan_add": 3}
"""Products of bfloat16 terms in the kernels that multiply queries and sub-keys in float32."""
_LOOPS = {
    _SELECT: "keys, forward",
    "slot_read_error": "values, forward",
    "slot_back": "values, backward",
    "slot_dot": "values, backward",
    "key_scan_pulls_back": "keys, backward",
}
"""Loops by a kernel in them; another loop that multiplies is that of the keys, backward."""


@dataclass(frozen=True, kw_only=True)
class Options(Passes):
    """Models the time of the memories in a training step."""

    chunks: int = 8
    """Chunks of a sequence."""
    text: Path | None = None
    """Compiled text of these sizes to read, in place of compiling."""
    width: int = 768
    """Width of the model, for the projections."""
    memories: int = 3
    """Layers with a memory."""
    distinct: float = 0.73
    """Share of a chunk's references that are distinct rows: 24,000 of 32,768 (paper, Table 4)."""
    bandwidth_tbs: float = 3.35
    """Device memory, TB/s: 3.35 of an H100, 4.8 of an H200."""
    bandwidth_share: float = 0.7
    """Share of it that launches reach."""
    tflops: float = 989.0
    """bfloat16 products, TFLOP/s."""
    tflops_share: float = 0.4
    """Share of it that products reach."""
    launch_us: float = 4.0
    """What each launch takes besides, in microseconds."""
    backbone_ms: tuple[float, ...] = (147.0, 55.7)
    """Steps without memories: the authors' (54.44 samples per second), and at 40 % of the rate."""


def modelled(options: Options, text: str) -> dict[str, Any]:
    """The table of loops, and the step's time from it."""
    tokens = options.batch * options.chunk_size
    sizes = Sizes(tokens=tokens, places=_PLACES, value=options.dim, distinct=options.distinct)
    rows = []
    for name, (turns, found) in launches(text, sizes).items():
        if found:
            found = [_with_products(one, options) for one in found]
            rows.append({"loop": _loop(name, found), "turns": turns, **_cost(found, options)})
    of_memory = sum(row["turns"] * row["microseconds"] for row in rows)
    # Queries, values and output; their gradients take twice as much.
    projection = Launch(
        "projections",
        3 * 4.0 * tokens * (options.width + options.dim),
        3 * 2.0 * tokens * options.width * options.dim,
    )
    of_layer = 3 * options.chunks * _cost([projection], options)["microseconds"]
    memories_ms = options.memories * (of_memory + of_layer) / 1000
    return {
        "rows": rows,
        "chunk_and_layer_us": of_memory / options.chunks,
        "memories_ms": memories_ms,
        "ratio": {str(ms): ms / (ms + memories_ms) for ms in options.backbone_ms},
    }


def _loop(name: str, found: Sequence[Launch]) -> str:
    if name == "ENTRY":
        return "once per sequence"
    kernels = [_LOOPS[one.name] for one in found if one.name in _LOOPS]
    if kernels:
        return kernels[0]
    return "keys, backward" if any(one.operations for one in found) else name


def _with_products(one: Launch, options: Options) -> Launch:
    """The products of a kernel, which XLA's text does not state."""
    if one.name not in _PARTS:
        return one
    tokens = options.batch * options.chunk_size
    operations = 2.0 * tokens * options.subkeys * options.dim * _PARTS[one.name]
    return one._replace(operations=operations)


def _cost(found: Sequence[Launch], options: Options) -> dict[str, float]:
    bandwidth = options.bandwidth_tbs * options.bandwidth_share * 1e6  # Bytes per microsecond.
    rate = options.tflops * options.tflops_share * 1e6
    times = [max(one.bytes / bandwidth, one.operations / rate) for one in found]
    return {
        "launches": len(found),
        "megabytes": sum(one.bytes for one in found) / 1e6,
        "gigaflop": sum(one.operations for one in found) / 1e9,
        "microseconds": sum(times) + options.launch_us * len(found),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    text = compiled_text(options) if options.text is None else options.text.read_text()
    result = {"jax": jax.__version__, "options": settings(options), **modelled(options, text)}
    for row in result["rows"]:
        print(json.dumps(row), file=sys.stderr)
    write_result(result, options.out)


if __name__ == "__main__":
    main()
