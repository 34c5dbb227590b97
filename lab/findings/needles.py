"""Shares of needles that models of the study answer, by training."""

from __future__ import annotations

from lab.findings.stored import Line, lines_of

HALF, OPEN = "gdn_swa__fwpkm", "gdn_swa__fwpkm__open"
"""Models whose gates start at a half, and at 0.88."""


def trainings() -> list[Line]:
    """Every line of the study's models, of both times that they were trained."""
    files = ("study_cpu.jsonl", "study_second_cpu.jsonl", "study_second_15x_cpu.jsonl")
    return [line for name in files for line in lines_of(name)]


def shares_by_seed(model: str, label: str, *, readings: int) -> list[float]:
    """As `shares`, one number for each seed: trainings of one seed are no independent ones."""
    found: dict[str, list[float]] = {}
    for line in trainings():
        if line["run"].partition(":")[0] == model:
            of_line = [x["accuracy"] for x in line.get(label, ()) if x["readings"] == readings]
            found.setdefault(line["run"], []).extend(of_line)
    return [sum(values) / len(values) for _, values in sorted(found.items()) if values]


def shares(model: str, label: str, *, readings: int) -> list[float]:
    """The share of right answers of each training of a model, in the order of the lines.

    Args:
      model: name of the run, without its seed.
      label: of the evaluation, such as `needle_1x`.
      readings: of the haystack.
    """
    return [
        run["accuracy"]
        for line in trainings()
        if line["run"].partition(":")[0] == model
        for run in line.get(label, ())
        if run["readings"] == readings
    ]
