"""How do memories compare? Pairs of key and value that one layer holds, per byte of its state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from lab.comparison.mqar_tables import chosen
from lab.findings import drawing
from lab.findings.stored import Estimate, Line, lines_of, markdown, numbers, share_over_seeds

LINES = "mqar_cpu.jsonl"
PAIRS = (64, 256)


class Memory(NamedTuple):
    """A row: what a memory is called here, its name in the lines, and the start of its keys."""

    title: str
    name: str
    tied: bool | None = None
    head_dim: int | None = None


MEMORIES = (
    Memory("softmax attention", "attention"),
    Memory("FwPKM, 1,024 slots", "fwpkm_32"),
    Memory("FwPKM, 256 slots", "fwpkm_16"),
    Memory("FwPKM, 64 slots", "fwpkm_8"),
    Memory("Titans (MLP)", "titans"),
    Memory("DeltaNet, keys begin as queries", "deltanet", tied=True),
    Memory("the same, heads of 96 channels", "deltanet", tied=True, head_dim=96),
    Memory("DeltaNet, keys drawn apart", "deltanet"),
)


CHANGED = ("comba", "rwkv7", "ttt_linear", "ttt_mlp")
"""Memories that were measured before they became what their authors' code has."""


def runs(memory: Memory) -> list[Line]:
    """The trainings of a memory in the task `stacked`, at the rate that its first seed chose."""
    found = []
    for line in lines_of(LINES):
        about = line["settings"]
        if (about["setting"], about["epochs"]) != ("stacked", 8):
            continue
        if about["decay_start"] != "time_steps" or about.get("tied_start") != memory.tied:
            continue
        if about.get("head_dim") != memory.head_dim:
            continue
        if line["memory"] == memory.name:
            found.append(line)
    return chosen(found)[memory.name]


def shares(memory: Memory, pairs: int) -> list[float]:
    """Share of right answers in documents of so many pairs, by training."""
    tests = [{one["pairs"]: one["accuracy"] for one in line["test"]} for line in runs(memory)]
    return [test[pairs] for test in tests]


def bytes_of(memory: Memory) -> tuple[int, int]:
    """Bytes that the state has, and that a token reads of it."""
    line = runs(memory)[0]
    return line["state_bytes"], line["bytes_touched"]


def most_held(memory: Memory) -> float:
    """The most pairs that are answered of a document, in the mean over trainings and documents.

    Attention's bytes are those of the longest documents of training, so longer ones do not count.
    """
    most = PAIRS[0] if memory.name == "attention" else PAIRS[-1]
    tests = [[one for one in line["test"] if one["pairs"] <= most] for line in runs(memory)]
    held = [[one["pairs"] * one["accuracy"] for one in test] for test in tests]
    return float(np.mean(held, axis=0).max())


def _share(memory: Memory, pairs: int) -> Estimate:
    return share_over_seeds(shares(memory, pairs))


def answer() -> str:
    equal, large = MEMORIES[2], MEMORIES[1]
    matrix = MEMORIES[6]
    state, read = bytes_of(large)
    few, many = PAIRS
    of_matrix = [f"{_share(matrix, pairs).mean:.2f}" for pairs in PAIRS]
    of_slots = [f"{_share(equal, pairs).mean:.2f}" for pairs in PAIRS]
    return (
        f"With {bytes_of(matrix)[0] / 1000:.0f} kB a matrix holds at least as much: DeltaNet"
        f" answers {of_matrix[0]} of {few} pairs and {of_matrix[1]} of {many}, FwPKM {of_slots[0]}"
        f" and {of_slots[1]}. A token reads all of the matrix and"
        f" {numbers(bytes_of(equal)[1])} bytes of FwPKM.\n"
        "FwPKM holds more by having more slots, without reading much more:"
        f" {_share(large, few).mean:.2f} with {numbers(state)} bytes, of which a token reads"
        f" {numbers(read)}."
    )


def table() -> str:
    rows = []
    for memory in MEMORIES:
        state, read = bytes_of(memory)
        cells = [memory.title, numbers(state), numbers(read)]
        cells += [f"{_share(memory, pairs):.2f}" for pairs in PAIRS]
        rows.append([*cells, numbers(state / most_held(memory))])
    head = ["memory", "bytes of state", "read per token"]
    head += [f"of {pairs} pairs" for pairs in PAIRS]
    return markdown([*head, "bytes per pair held"], rows)


def notes() -> str:
    started = [x for x in lines_of(LINES) if x["settings"].get("tied_start")]
    tied = [x for x in started if "head_dim" not in x["settings"]]
    rules = dict.fromkeys(x["memory"] for x in tied if x["memory"] not in CHANGED)
    held = [_share_of_64(Memory(name, name, tied=True)) for name in rules]
    apart = shares(MEMORIES[-1], 64)
    updates = runs(MEMORIES[5])[0]["steps"]
    return "\n".join(
        [
            f"- {numbers(updates)} updates in place of the published {numbers(22_500)}, and three"
            " seeds: no ranking of the delta rules follows. With keys that begin as queries"
            f" {len(rules)} of them lie between {min(held):.2f} and {max(held):.2f} of 64 pairs.",
            f"- With keys drawn apart DeltaNet answers {min(apart):.2f} to {max(apart):.2f}, by"
            " seed: what separates seeds and rules is mostly whether a query finds its"
            " key.",
        ]
    )


def _share_of_64(memory: Memory) -> float:
    return float(np.mean(shares(memory, 64)))


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(3.9)
    places = {
        "softmax attention": ("attention", (-8, -14), "right"),
        "FwPKM, 1,024 slots": ("FwPKM, 1,024 slots", (0, -15), "center"),
        "FwPKM, 256 slots": ("256 slots", (0, -15), "center"),
        "FwPKM, 64 slots": ("64 slots", (9, -3), "left"),
        "Titans (MLP)": ("Titans", (9, -3), "left"),
        "DeltaNet, keys begin as queries": ("DeltaNet", (9, -2), "left"),
        "the same, heads of 96 channels": ("DeltaNet, heads of 96", (-9, 4), "right"),
        "DeltaNet, keys drawn apart": ("DeltaNet, keys drawn apart", (9, -3), "left"),
    }
    for memory in MEMORIES:
        name, offset, align = places[memory.title]
        color = drawing.BLUE if memory.name.startswith("fwpkm") else drawing.ORANGE
        color = drawing.INK if memory.name == "attention" else color
        found = shares(memory, 64)
        state = bytes_of(memory)[0]
        axis.plot([state, state], [min(found), max(found)], color=color, linewidth=1.4)
        axis.scatter([state], [np.mean(found)], s=40, color=color, zorder=3)
        point = (state, float(np.mean(found)))
        style = {"textcoords": "offset points", "fontsize": 9.5, "color": color, "ha": align}
        axis.annotate(name, point, xytext=offset, **style)
    axis.set_xscale("log")
    axis.set_xlim(5e3, 6e5)
    axis.set_ylim(0, 1.05)
    axis.grid(axis="y", color=drawing.GRID, linewidth=0.8)
    drawing.label(axis, x="bytes of state (log scale)", y="answers right, of 64 pairs")
    return figure
