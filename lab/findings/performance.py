"""Speed and faithfulness: a step on an H100, the memory on a CPU, and the paper's Table 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper.cost import model_cost
from benchmarks.paper.published import PUBLISHED
from fwpkm_jax.paper.models import paper_model
from lab.findings import drawing
from lab.findings.stored import Line, document_of, lines_of, markdown

NONE, FWPKM = "gdn", "gdn__fwpkm2_6_10"
STEPS, STEPS_H200 = "h100/steps.jsonl", "h200_2/steps.jsonl"
RUNS = (4, 5)
"""Runs of the memory beside the authors'; the first with both allocators, both with one that keeps
memory."""
FLAG = "flags"
"""The variant with the compiler's flag that launch/README.md recommends."""


class Spread(NamedTuple):
    """The median of repetitions, the least and the largest of them."""

    median: float
    least: float
    most: float

    def shown(self, form: str, unit: str = "") -> str:
        median, least, most = (format(x, form) for x in self)
        return f"{median}{unit} ({least} to {most})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(float(np.median(values)), min(values), max(values))


def step_line(model: str, variant: str = FLAG, file: str = STEPS) -> Line:
    """The timed steps of 8 x 4,096 tokens on the device of a file."""
    (line,) = [
        one
        for one in lines_of(file)
        if (one["model"], one["variant"]) == (model, variant) and "milliseconds" in one
    ]
    return line


def step(model: str, variant: str = FLAG, file: str = STEPS) -> float:
    """Milliseconds of a training step of 8 x 4,096 tokens on the device of a file."""
    return step_line(model, variant, file)["milliseconds"]


def blocks(model: str) -> Spread:
    """That step's repetitions on the H100."""
    return spread(step_line(model)["block_milliseconds"])


def samples(milliseconds: float) -> str:
    """Sequences per second of such a step, in two digits: repetitions differ by up to 6 %."""
    return f"{float(f'{8000 / milliseconds:.1e}'):.0f}"


def relative() -> tuple[Spread, float]:
    """Speed with three memories relative to none: measured here, and in the paper."""
    theirs = PUBLISHED[FWPKM].samples_per_second / PUBLISHED[NONE].samples_per_second
    none, three = blocks(NONE), blocks(FWPKM)
    ours = none.median / three.median, none.least / three.most, none.most / three.least
    return Spread(*ours), theirs


def memory(run: int, who: str, allocator: str, part: str, subkeys: int = 512) -> float | None:
    """Milliseconds per token of the memory alone on a CPU; None where it was not measured."""
    rows = document_of(f"memory_cpu_{run}.json")["rows"]
    asked = {"memory": who, "allocator": allocator, "pass": part, "subkeys": subkeys}
    for row in rows:
        if all(row[name] == value for name, value in asked.items()):
            return row.get("ms_per_token")
    return None


def times_faster(run: int, allocator: str, part: str, subkeys: int = 512) -> float | None:
    """The authors' time over ours in a run with that allocator."""
    ours, theirs = (memory(run, who, allocator, part, subkeys) for who in ("fwpkm_jax", "authors"))
    return theirs / ours if ours and theirs else None


def keeping(part: str, subkeys: int = 512) -> list[float]:
    """How many times faster ours is with an allocator that keeps memory, by run."""
    found = (times_faster(run, "keep", part, subkeys) for run in RUNS)
    return [one for one in found if one is not None]


def kept_alone(subkeys: int) -> float:
    """Milliseconds of the memory alone per trained token, in the faster run that keeps memory."""
    found = (memory(run, "fwpkm_jax", "keep", "train", subkeys) for run in RUNS)
    return min(one for one in found if one is not None)


def notes() -> str:
    """Processor time from a command's start to its end, compiled for the first time and again."""
    rows = document_of("restart_cpu.json")["rows"]
    times = {(row["what"], row["programs"]): row["processor_seconds"] for row in rows}
    table = [
        [what, *(f"{times[what, state]:.0f} s" for state in ("compiled", "found again"))]
        for what in dict.fromkeys(row["what"] for row in rows)
    ]
    return markdown(["first result", "compiled", "found again"], table)


def beside_the_authors() -> str:
    """README's sentence on the memory alone on a CPU."""
    default = times_faster(RUNS[0], "default", "train")
    assert default is not None
    return (
        "On a CPU, a training pass through the authors' memory of 512 x 512 slots takes about"
        f" {about(min(keeping('train')))} times as long as one\nthrough this one with an allocator"
        f" that keeps memory, and about {about(default)} times with glibc's default. The authors'"
        " time\nvaries by more than half from one repetition to the next."
    )


def about(times: float) -> str:
    """A ratio of times, to the next five from ten on: repetitions differ by more than a tenth."""
    return f"{5 * round(times / 5) if times > 10 else round(times)}"


def train_step_cpu(variant: str) -> Spread:
    """Seconds of a training step of 1,024 tokens of the paper's model on a CPU."""
    (row,) = [x for x in document_of("train_step_cpu.json")["rows"] if x["variant"] == variant]
    return spread(row["seconds"])


def longer_cpu() -> tuple[float, float]:
    """By what share three memories make that step longer, at least and at most."""
    none, three = train_step_cpu("none"), train_step_cpu("fwpkm")
    return three.least / none.most - 1, three.most / none.least - 1


def decode_cpu(variant: str) -> float:
    """Milliseconds of decoding a token of the paper's model on a CPU."""
    (row,) = [x for x in document_of("decode_cpu.json")["rows"] if x["variant"] == variant]
    return row["ms_per_token"]


def slots_cost() -> float:
    """Forward time of a layer with a million slots over that of one with 16 thousand."""
    rows = document_of("layer_cpu.json")["rows"]
    of = {row["subkeys"]: row["ms_per_token"] for row in rows if row["pass"] == "forward"}
    return of[1024] / of[128]


def furthest_parameters() -> tuple[float, int]:
    """Largest difference from the paper's counts in millions, and the number of models."""
    differences = []
    for name, published in PUBLISHED.items():
        cost = model_cost(paper_model(name))
        differences += [abs(round(cost.total / 1e6, 2) - published.total)]
        differences += [abs(round(cost.active / 1e6, 2) - published.active)]
    return round(max(differences), 3), len(PUBLISHED)


def answer() -> str:
    ours, theirs = relative()
    furthest, models = furthest_parameters()
    return (
        f"With three memories the paper's model trains at {ours.median:.1f} of its backbone's speed"
        f" on an H100, the paper's device, where the paper reports {theirs:.2f}.\n"
        f"The parameters of the {models} models of the paper's Table 1 agree with it within"
        f" {furthest:.2f} million."
    )


def table() -> str:
    ours, theirs = relative()
    none, three = (PUBLISHED[name].samples_per_second for name in (NONE, FWPKM))
    alone = {one: kept_alone(one) for one in (128, 512)}
    default = {one: times_faster(RUNS[0], "default", "train", one) for one in alone}
    kept = {one: keeping("train", one) for one in alone}

    def authors(subkeys: int) -> str:
        times = default[subkeys]
        assert times is not None
        return (
            f"the authors': about {about(min(kept[subkeys]))} times as long with an allocator"
            f" that keeps memory; about {about(times)} times with glibc's default"
        )

    rows = [
        [
            "training step on an H100, no memory",
            f"{blocks(NONE).shown('.0f', ' ms')}, about {samples(step(NONE))} samples/s",
            f"paper: {none:.0f} samples/s",
        ],
        [
            "the same, three memories",
            f"{blocks(FWPKM).shown('.0f', ' ms')}, about {samples(step(FWPKM))} samples/s",
            f"paper: {three:.0f} samples/s",
        ],
        ["speed with memories, relative", ours.shown(".2f"), f"paper: {theirs:.2f}"],
        [
            "memory alone on a CPU, 512 x 512 slots",
            f"{alone[512]:.2f} ms per token",
            authors(512),
        ],
        ["the same, 128 x 128 slots", f"{alone[128]:.2f} ms per token", authors(128)],
        [
            "training step on a CPU, three memories",
            train_step_cpu("fwpkm").shown(".1f", " s"),
            f"no memory: {train_step_cpu('none').shown('.1f', ' s')}",
        ],
        [
            "decoding a token on a CPU, three memories",
            f"{decode_cpu('fwpkm'):.0f} ms",
            f"no memory: {decode_cpu('none'):.0f} ms",
        ],
        [
            "a layer of a million slots on a CPU, forward",
            f"about {slots_cost():.0f} times as long as one of 16 thousand",
            "",
        ],
    ]
    return markdown(["what", "here", "beside it"], rows)


def readme_cost() -> list[list[str]]:
    """Rows of README's table of costs on a CPU: what, without a memory, with three."""
    seconds = [train_step_cpu(one).shown(".1f", " s") for one in ("none", "fwpkm")]
    milliseconds = [f"{decode_cpu(one):.0f} ms" for one in ("none", "fwpkm")]
    return [
        ["training step of 1,024 tokens", *seconds],
        ["decoding, per token", *milliseconds],
    ]


INFERENCE = "inference_cpu.jsonl"
"""Each program with the package as it was and as it is, one after the other."""


def inference(package: str, program: str, entry: str) -> float:
    """The mean over turns of an entry of a program's line."""
    found = [
        line["row"][entry]
        for line in lines_of(INFERENCE)
        if (line["package"], line["program"]) == (package, program)
    ]
    return float(np.mean(found))


def results() -> str:
    """Prefill, decoding and users in a batch: what they took before, and what they take."""
    rows = []
    for name, program, entry in (
        ("a prompt of 512 tokens, per token", "decode", "prompt_processor_ms_per_token"),
        ("a decoded token, one sequence", "decode", "processor_ms_per_token"),
    ):
        before, now = (inference(package, program, entry) for package in ("before", "now"))
        rows.append([name, f"{before:.1f} ms", f"{now:.1f} ms", f"{before / now:.2f}"])
    gains = [
        inference(package, "continuous_batching", "times_of_cpu_time")
        for package in ("before", "now")
    ]
    rows.append(
        [
            "16 users at once, relative to one by one",
            *(f"{gain:.1f} times" for gain in gains),
            f"{gains[1] / gains[0]:.2f}",
        ]
    )
    return markdown(["processor time on a CPU", "before", "now", "gain"], rows)


def draw() -> Figure:
    figure, (axis,) = drawing.new_figure(2.5)
    published = [PUBLISHED[name].samples_per_second for name in (NONE, FWPKM)]
    names = ["here", "paper"]
    for at, (none, with_memory) in enumerate(
        zip((8000 / step(NONE), published[0]), (8000 / step(FWPKM), published[1]), strict=True)
    ):
        first = at == 0
        axis.barh(at - 0.19, none, 0.34, color=drawing.GREY, label="no memory" * first)
        axis.barh(at + 0.19, with_memory, 0.34, color=drawing.BLUE, label="three memories" * first)
        for place, value in ((at - 0.19, none), (at + 0.19, with_memory)):
            axis.text(
                value + 1.5, place, f"{float(f'{value:.1e}'):.0f}", va="center", fontsize=10.5
            )
    axis.set_yticks(range(2), names)
    axis.set_ylim(1.55, -0.55)
    axis.set_xlim(0, 148)
    drawing.label(axis, x="sequences of 4,096 tokens trained per second on an H100")
    drawing.legend(figure, axis)
    return figure
