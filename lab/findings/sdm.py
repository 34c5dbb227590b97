"""FwPKM or Sparse Delta Memory? Pairs of key and value that a short training teaches both."""

from __future__ import annotations

from matplotlib.figure import Figure

from lab.comparison.mqar_tables import chosen
from lab.findings import comparison, drawing
from lab.findings.stored import (
    Estimate,
    Line,
    document_of,
    lines_of,
    markdown,
    numbers,
    share_over_seeds,
)

LINES = "mqar_sdm_cpu.jsonl"
TIMES = "layer_sdm_cpu.json"
MEMORIES = {"FwPKM": "fwpkm_16", "SDM": "sdm_heads"}
"""Names of memories in the lines, by what they are called here."""
TABLES = {"FwPKM": "FwPKM, 256 slots", "SDM": "SDM, 2 tables of 256 slots"}


def runs(memory: str) -> list[Line]:
    """The trainings of a memory, at the rate that its first seed chose."""
    return chosen(lines_of(LINES))[MEMORIES[memory]]


def shares(memory: str) -> list[float]:
    """Share of right answers in the test, by training."""
    return [test["accuracy"] for run in runs(memory) for test in run["test"]]


def share(memory: str) -> Estimate:
    return share_over_seeds(shares(memory))


def rates(memory: str) -> list[float]:
    """The rates that were tried with the first seed."""
    found = {line["rate"] for line in lines_of(LINES) if line["memory"] == MEMORIES[memory]}
    return sorted(found)


def microseconds(rule: str, which: str) -> float:
    """CPU time of a layer per token."""
    (row,) = (
        row for row in document_of(TIMES)["rows"] if (row["rule"], row["pass"]) == (rule, which)
    )
    return 1e3 * row["cpu_ms_per_token"]


def answer() -> str:
    fwpkm, sdm = (share(memory) for memory in MEMORIES)
    (updates,) = {run["steps"] for memory in MEMORIES for run in runs(memory)}
    assert fwpkm.low > sdm.high
    times = microseconds("sdm", "train") / microseconds("fwpkm", "train")
    return (
        f"FwPKM, after a short training: with about as many bytes it answers {fwpkm.mean:.2f} of 64"
        f" pairs after {updates} updates, SDM {sdm.mean:.2f}, and SDM was still learning.\n"
        "Which of them holds more after a long training was not measured. A training step of an SDM"
        f" layer takes {times:.1f} times the processor time."
    )


def table() -> str:
    rows = []
    for memory in MEMORIES:
        found = runs(memory)
        state, read = (numbers(found[0][name]) for name in ("state_bytes", "bytes_touched"))
        tried = ", ".join(f"{rate:g}" for rate in rates(memory))
        cells = [TABLES[memory], state, read, f"{found[0]['rate']:g} of {tried}"]
        rows.append([*cells, str(len(found)), f"{share(memory):.2f}"])
    head = ["memory", "bytes of state", "read per token", "learning rate", "seeds", "of 64 pairs"]
    return markdown(head, rows)


def notes() -> str:
    long = share_over_seeds(comparison.shares(comparison.MEMORIES[2], 64))
    updates = comparison.runs(comparison.MEMORIES[2])[0]["steps"]
    last = [[run["curve"][at][2] for run in runs("SDM")] for at in (-2, -1)]
    before, after = (sum(one) / len(one) for one in last)
    forward, train = (
        (microseconds("fwpkm", which), microseconds("sdm", which)) for which in ("forward", "train")
    )
    return "\n".join(
        [
            f"- SDM was still learning: {before:.2f} of the pairs of the validation one quarter of"
            f" the training before its end, {after:.2f} at the end. FwPKM answers {long.mean:.2f}"
            f" after {updates} updates of 256 documents.",
            "- Processor time of a layer with one table of 1,024 slots of 64 numbers, 8 of which a"
            f" token reads, and 8 of which it writes: {forward[0]:.0f} microseconds a token with"
            f" FwPKM and {forward[1]:.0f} with SDM, with gradients {train[0]:.0f} and"
            f" {train[1]:.0f}. The machine did other work at the same time.",
        ]
    )


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(3.2)
    for memory, color in zip(MEMORIES, (drawing.BLUE, drawing.ORANGE), strict=True):
        for run in runs(memory):
            steps, _, right = zip(*run["curve"], strict=True)
            name = memory if run is runs(memory)[0] else None
            axis.plot(
                steps, right, color=color, linewidth=1.4, marker="o", markersize=5, label=name
            )
    axis.set_ylim(0, 1.05)
    axis.grid(axis="y", color=drawing.GRID, linewidth=0.8)
    drawing.label(axis, x="updates of 32 documents; a line is a seed", y="right, of 64 pairs")
    drawing.legend(figure, axis)
    return figure
