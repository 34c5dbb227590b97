"""Times FwPKM's memory without projections by its number of slots, beside the authors' memory.

    python -m benchmarks.speed.memory --peer CHECKOUT --peer-python TORCH_PYTHON \
        --out benchmarks/results/memory_cpu.json

The forward pass is `FwPKM.run` from queries, values and gates to reads and the written memory. The
training pass adds gradients to queries, values and gates. `--peer` names a checkout of the authors'
repository, for example in the ignored folder `peers/`. Their PyTorch memory is then timed on the
same shapes in the same run, after a comparison of outputs, written memory and gradients on a small
memory (`relative_difference`). Every row has its own process, so that peak memory is its own.

By default glibc's malloc returns large blocks to the system at once. A program that allocates a new
table at every write then spends most of its time on new pages. With `--allocators keep` malloc
keeps freed blocks in both programs, which makes such a program faster and larger.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import processes
from benchmarks.machine import (
    environment,
    median_seconds,
    peak_device_megabytes,
    peak_host_megabytes,
    planned_megabytes,
    settings,
    write_result,
)
from benchmarks.options import from_json, parse, to_json
from benchmarks.speed.layer import table_copies, uniform_memory
from fwpkm_jax.rules import FwPKM, FwPKMMemory

Allocator = Literal["default", "keep"]
_KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
PEER_PROGRAM = Path(__file__).with_name("peer_memory.py")
ALLOCATORS: dict[Allocator, dict[str, str]] = {"default": {}, "keep": _KEEP}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Times FwPKM's memory, forward and forward + backward, for several numbers of slots."""

    subkeys: tuple[int, ...] = (128, 512, 1024)
    """Sub-keys per codebook; each size has this many squared slots."""
    dim: int = 512
    """Width of keys and values."""
    top_k: int = 8
    """Slots read per token."""
    chunk_size: int = 512
    """Tokens between two writes."""
    length: int = 4096
    """Tokens of a sequence in the forward pass."""
    backward_length: int = 2048
    """Tokens of a sequence in the forward + backward pass."""
    batch: int = 1
    """Sequences, which share one memory."""
    repeats: int = 5
    """Timed calls; the median is reported."""
    passes: tuple[Literal["forward", "train"], ...] = ("forward", "train")
    """Forward alone, or forward + backward to queries, values and gates."""
    allocators: tuple[Allocator, ...] = ("default", "keep")
    """default: glibc's malloc as it is; keep: it keeps freed memory."""
    peer: Path | None = None
    """Checkout of the authors' repository; None: no peer is timed."""
    peer_python: Path = Path(sys.executable)
    """Python with torch and numpy."""
    peer_subkeys: tuple[int, ...] = (128, 512)
    """Sizes for the peer; at 1024 its backward pass needs about 60 GB."""
    out: Path | None = None
    """File for the JSON; None: print it."""


def measure(options: Options, subkeys: int, which: str) -> dict[str, Any]:
    """Times one size and pass of this library in this process."""
    rule = rule_of(options, subkeys)
    memory = jax.tree.map(lambda x: x[0], jax.jit(lambda: uniform_memory(rule))())
    jax.block_until_ready(memory)
    shape = (options.batch, options.length if which == "forward" else options.backward_length)
    rngs = jax.random.split(jax.random.key(1), 4)
    query = jax.random.normal(rngs[0], (*shape, 1, options.dim))
    value, cotangent = (jax.random.normal(rng, (*shape, options.dim)) for rng in rngs[1:3])
    gate = jax.random.uniform(rngs[3], shape)
    function = {"forward": forward, "train": train}[which]

    # The memory is donated, as in training, where the old memory is not needed afterwards.
    def step(memory, *arrays):
        return function(rule, options.chunk_size, memory, *arrays)

    arrays = (query, value, gate) if which == "forward" else (query, value, gate, cotangent)
    compiled = jax.jit(step, donate_argnums=0).lower(memory, *arrays).compile()
    state = {"memory": memory}
    del memory

    def call():
        state["memory"], results = compiled(state["memory"], *arrays)
        return state["memory"], results

    seconds, spread = median_seconds(call, repeats=options.repeats)
    table = f"f32[{rule.num_slots},{rule.value_dim}]"
    return {
        "seconds": seconds,
        "spread": spread,
        "peak_megabytes": peak_host_megabytes(),
        "peak_device_megabytes": peak_device_megabytes(),
        "temporary_megabytes": planned_megabytes(compiled)["temporary"],
        "table_copies": table_copies(compiled, table),
    }


def rule_of(options: Options, subkeys: int) -> FwPKM:
    return FwPKM(
        num_subkeys=subkeys, key_dim=options.dim, value_dim=options.dim, top_k=options.top_k
    )


def forward(rule: FwPKM, chunk_size: int, memory: FwPKMMemory, query, value, gate):
    """The written memory; output, access and addressing loss."""
    sequence = rule.sequence(query, value, gate=gate, chunk_size=chunk_size)
    out = rule.run(memory, sequence, chunk_size=chunk_size)
    return out.memory, (out.output, out.access, out.info.addressing_loss)


def train(rule: FwPKM, chunk_size: int, memory: FwPKMMemory, query, value, gate, cotangent):
    """The written memory; gradients of `<output, cotangent>`, and output."""

    def loss(query, value, gate):
        written, (output, *_) = forward(rule, chunk_size, memory, query, value, gate)
        return jnp.sum(output * cotangent), (written, output)

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    gradients, (written, output) = gradient(query, value, gate)
    return written, (gradients, output)


def peer_task(options: Options, **fields: Any) -> dict[str, Any]:
    """The task for `peer_memory.py`."""
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    shared = {name: getattr(options, name) for name in ("dim", "top_k", "chunk_size", "batch")}
    return {**shared, "peer": str(options.peer), "device": device} | fields


def peer_process(
    options: Options, *, allocator: Allocator = "default", **fields: Any
) -> dict[str, Any]:
    """What the peer's process prints."""
    task = json.dumps(peer_task(options, **fields))
    command = [str(options.peer_python), str(PEER_PROGRAM), "--task", task]
    return processes.run_json(command, variables=ALLOCATORS[allocator])


def disagreement(options: Options) -> dict[str, Any]:
    """Norms of the differences to the peer's results on a small memory, relative to the norms.

    `{"failed": ...}` if the peer gives no results.
    """
    options = replace(options, chunk_size=64, batch=2)
    rule = rule_of(options, 32)
    memory = rule.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    shape = (2, 256)
    arrays: dict[str, Any] = {"keys": memory.keys, "values": memory.values}
    arrays["gate"] = rng.random(shape)
    for name in ("query", "value", "cotangent"):
        arrays[name] = rng.normal(size=(*shape, options.dim))
    # Near the keys: a query far from all of them chooses by the last bits.
    arrays["query"] *= options.dim**-0.5
    arrays = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    given = {name: jnp.asarray(arrays[name]) for name in ("value", "gate", "cotangent")}
    query = jnp.asarray(arrays["query"])[:, :, None]
    run = jax.jit(train, static_argnums=(0, 1))
    written, (gradients, output) = run(rule, 64, memory, query, **given)
    names = ("output", "keys", "values", "d_query", "d_value", "d_gate")
    ours = (output, written.keys, written.values, *gradients)
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: str(Path(folder, f"{name}.npz")) for name in ("arrays", "results")}
        np.savez(paths["arrays"], **arrays)
        fields: dict[str, Any] = {"subkeys": 32, "pass": "agree", **paths}
        done = peer_process(options, **fields)
        if "failed" in done:
            return done
        theirs = dict(np.load(paths["results"]))

    def relative(a: jax.Array, b: np.ndarray) -> float:
        difference = np.asarray(a, np.float64).reshape(b.shape) - b
        return float(np.linalg.norm(difference) / np.linalg.norm(b))

    return {name: relative(x, theirs[name]) for name, x in zip(names, ours, strict=True)}


def rows_of(
    options: Options, subkeys: int, which: Literal["forward", "train"]
) -> Iterator[dict[str, Any]]:
    """Rows of this library and of the peer, if it is given; each has its own process."""
    length = options.length if which == "forward" else options.backward_length
    tokens = options.batch * length
    task = replace(options, subkeys=(subkeys,), passes=(which,), out=None, peer=None)
    fields = {"pass": which, "subkeys": subkeys, "tokens": tokens, "repeats": options.repeats}
    for allocator in options.allocators:
        done = {
            "fwpkm_jax": processes.run_worker(
                "benchmarks.speed.memory", to_json(task), variables=ALLOCATORS[allocator]
            )
        }
        if options.peer is not None and subkeys in options.peer_subkeys:
            done["authors"] = peer_process(options, allocator=allocator, **fields)
        for name, row in done.items():
            head = {"memory": name, "allocator": allocator, "pass": which, "subkeys": subkeys}
            head |= {"tokens": tokens, "table_megabytes": subkeys**2 * options.dim * 4 / 1e6}
            if "seconds" in row:
                head["ms_per_token"] = 1e3 * row.pop("seconds") / tokens
                head["ms_per_token_spread"] = 1e3 * row.pop("spread") / tokens
            yield head | row


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of time and peak memory to the authors', and of time to the smallest memory's."""
    keys = ("memory", "allocator", "pass", "subkeys")
    good = {tuple(r[k] for k in keys): r for r in rows if "ms_per_token" in r}
    result = []
    for (name, allocator, which, subkeys), row in good.items():
        if name != "fwpkm_jax":
            continue
        entry = {"allocator": allocator, "pass": which, "subkeys": subkeys}
        smallest = min(k[3] for k in good if k[:3] == (name, allocator, which))
        base = good[name, allocator, which, smallest]
        entry["time_over_smallest"] = row["ms_per_token"] / base["ms_per_token"]
        peer = good.get(("authors", allocator, which, subkeys))
        if peer is not None:
            entry["times_faster"] = peer["ms_per_token"] / row["ms_per_token"]
            for peak in ("peak_megabytes", "peak_device_megabytes"):
                if row[peak] and peer[peak]:
                    entry[f"share_of_{peak}"] = row[peak] / peer[peak]
        result.append(entry)
    return result


def work(task: str) -> dict[str, Any]:
    """The row of the task's first size and pass, in this process."""
    options = from_json(Options, task)
    return measure(options, options.subkeys[0], options.passes[0])


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(Options, argv, description=__doc__)
    result: dict[str, Any] = {"environment": environment(), "options": settings(options)}
    if options.peer is not None:
        result["relative_difference"] = disagreement(options)
        print(json.dumps(result["relative_difference"]), file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for which in options.passes:
        for subkeys in options.subkeys:
            for row in rows_of(options, subkeys, which):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                result |= {"rows": rows, "ratios": ratios(rows)}
                if options.out is not None:
                    write_result(result, options.out)
    if options.out is None:
        write_result(result, None)


if __name__ == "__main__":
    main()
