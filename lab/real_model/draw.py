"""Draws exact answers by training time from `lab/results/real_model_cpu.jsonl`.

python -m lab.real_model.draw docs/images/findings/real_model.svg
"""

import json
import sys
from pathlib import Path

from lab.findings import drawing
from lab.findings.stored import path_of

NAME = "real_model_cpu.jsonl"


def main() -> None:
    """Writes the picture to the path on the command line."""
    lines = [json.loads(line) for line in path_of(NAME).read_text().splitlines()]
    curve = [line for line in lines if line.get("what") == "training"]
    figure, (axis,) = drawing.new_figure(2.8)
    minutes = [line["minutes"] for line in curve]
    for name, color, shown in (
        ("nearest", drawing.GREY, "the statement's query is the nearest"),
        ("written", drawing.BLUE, "exact answers, memory written"),
        ("not_written", drawing.ORANGE, "exact answers, not written"),
    ):
        axis.plot(minutes, [line[name] for line in curve], "o-", color=color, label=shown)
    axis.set_ylim(-0.02, 0.75)
    axis.legend(frameon=False, fontsize=9.5, loc="upper left")
    drawing.label(axis, x="minutes of training beside other work", y="of the questions")
    drawing.save(figure, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
