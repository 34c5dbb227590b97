"""Markdown tables of the study's lines, as lab/archive/study.md shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.findings import stored

Line = dict[str, Any]

_HAYSTACKS = ("needle_1x", "needle_window", "needle_8x", "needle_15x")
_CONTROLS = {
    "needle_1x": "needles, 1 and 4 readings",
    "needle_reset": "memory reset after each sample",
    "needle_8x": "at 8 times the length",
    "needle_8x_reset": "memory reset after each sample",
    "needle_other": "other words",
}
"""Heads of the needle columns of the table of controls, by result."""


def tables(lines: Sequence[Line], *, domains: Sequence[str], main: str) -> list[str]:
    """Markdown tables of finished runs.

    Args:
      lines: of `lab.study.study`, each with its `run` as NAME:SEED.
      domains: names of the domains, in reading order.
      main: name of the run with controls.
    """
    own = [line for line in lines if _name(line)[0] == main]
    return [
        perplexity_table(lines),
        needle_table(lines),
        reference_table(lines),
        control_table(lines),
        gate_table([line for line in own if "gates" in line]),
        longbench_table(lines),
        continual_table(lines, domains),
    ]


def _name(line: Line) -> tuple[str, str]:
    name, _, seed = line["run"].partition(":")
    return name, seed


def _by_name(lines: Sequence[Line]) -> list[Line]:
    """The seeds of a name together, in order; names in order of appearance."""
    names = list(dict.fromkeys(_name(line)[0] for line in lines))
    return sorted(lines, key=lambda x: (names.index(_name(x)[0]), int(_name(x)[1])))


def perplexity_table(lines: Sequence[Line]) -> str:
    """Perplexity with the memory written and frozen, and the difference of the losses."""
    rows = [
        "| model | seed | written | frozen | difference, nats | over books |",
        "|---|---|---|---|---|---|",
    ]
    seeds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "ppl" not in line:
            continue
        (name, seed), found = _name(line), line["ppl"]
        seeds.setdefault(name, []).append(found)
        cells = [name, seed, f"{found['writing']:.3f}"]
        cells.append(f"{found['frozen']:.3f}" if "frozen" in found else "")
        for kind in ("difference", "difference_over_books"):
            cells.append(_interval(*found[kind]) if kind in found else "")
        rows.append(_row(cells))
    for name, each in seeds.items():
        if len(each) > 1:
            written = over_seeds([found["writing"] for found in each], digits=3)
            changes = [found["difference"][0] for found in each if "difference" in found]
            over = f"{over_seeds(changes, digits=4)} (over seeds)" if changes else ""
            rows.append(_row([name, f"mean of {len(each)}", written, "", over, ""]))
    return "\n".join(rows)


def needle_table(lines: Sequence[Line]) -> str:
    """Shares of right answers by length of the haystack and number of readings."""
    rows = [
        "| model | seed | words | frozen | 1 reading | 2 | 3 | 4 | digits of 6, 1 and 4 readings |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label in _HAYSTACKS:
        seeds: dict[str, list[dict[int, Line]]] = {}
        for line in lines:
            if label not in line:
                continue
            name, seed = _name(line)
            runs = {run["readings"]: run for run in line[label]}
            words = next(iter(runs.values()))["words"]
            frozen = [x for x in line.get("needle_frozen", ()) if x["words"] == words]
            shown = f"{name}, window" if label == "needle_window" else name
            seeds.setdefault(shown, []).append(runs)
            cells = [shown, seed, str(words)]
            cells.append(f"{frozen[0]['accuracy']:.2f}" if frozen and shown == name else "")
            cells += [_share(runs[n]) if n in runs else "" for n in (1, 2, 3, 4)]
            cells.append(", ".join(f"{runs[n]['digits']:.1f}" for n in (1, 4) if n in runs))
            rows.append(_row(cells))
        for name, each in seeds.items():
            if len(each) > 1 and max(runs[1]["accuracy"] for runs in each) > 0:
                shares = [
                    over_seeds([runs[n]["accuracy"] for runs in each], least=0.0, most=1.0)
                    if n in each[0]
                    else ""
                    for n in (1, 2, 3, 4)
                ]
                words = str(each[0][1]["words"])
                rows.append(_row([name, f"mean of {len(each)}", words, "", *shares, ""]))
    return "\n".join(rows)


def reference_table(lines: Sequence[Line]) -> str:
    """Needles of models that read the question before the last write."""
    rows = ["| model | words | seed | 1 reading | 4 | rise |", "|---|---|---|---|---|---|"]
    rises: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        (name, seed), found = _name(line), line.get("needle_reference", ())
        runs = {(run["words"], run["readings"]): run for run in found}
        for words in sorted({words for words, _ in runs}):
            ends = [runs[words, readings] for readings in (1, 4)]
            rise = ends[1]["accuracy"] - ends[0]["accuracy"]
            rises.setdefault((name, words), []).append(rise)
            rows.append(_row([name, str(words), seed, *map(_share, ends), f"{rise:.2f}"]))
    for (name, words), values in rises.items():
        if len(values) > 1:
            mean = over_seeds(values, most=1.0)
            rows.append(_row([name, str(words), f"mean of {len(values)}", "", "", mean]))
    return "\n".join(rows)


def control_table(lines: Sequence[Line]) -> str:
    """Controls: perplexity without reads or with resets, needles with resets or in other words.

    Lines of one run, which may come from several files, count as one; those without perplexity are
    left out.
    """
    runs: dict[str, Line] = {}
    for line in lines:
        runs[line["run"]] = runs.get(line["run"], {}) | line
    found = [line for line in _by_name(list(runs.values())) if {"ppl", "ppl_reset"} <= line.keys()]
    labels = [label for label in _CONTROLS if all(label in line for line in found)]
    rows = [
        "| model | seed | perplexity: written | reset per book | frozen | slots at zero | "
        + " | ".join(_CONTROLS[label] for label in labels)
        + " |",
        "|---" * (6 + len(labels)) + "|",
    ]
    for line in found:
        ppl = line["ppl"]
        cells = [*_name(line), f"{ppl['writing']:.3f}", f"{line['ppl_reset']['writing']:.3f}"]
        cells += [f"{ppl['frozen']:.3f}", f"{line['ppl_ablated']['frozen']:.3f}"]
        for label in labels:
            of = {run["readings"]: run["accuracy"] for run in line[label]}
            cells.append(", ".join(f"{of[n]:.2f}" for n in (1, 4)))
        rows.append(_row(cells))
    return "\n".join(rows)


def still_table(lines: Sequence[Line]) -> str:
    """Needles with keys that move and with keys that stand still, also by fifth of the samples."""
    rows = [
        "| model | seed | training loss | words | 1 reading | 4 readings | by fifth |"
        " keys still: 1 reading | 4 readings | by fifth |",
        "|---" * 10 + "|",
    ]
    for label in ("needle_1x", "needle_8x", "needle_15x"):
        for line in _by_name(lines):
            if f"{label}_still" not in line:
                continue
            moving, still = (
                {run["readings"]: run for run in line[name]} for name in (label, f"{label}_still")
            )
            cells = [*_name(line), f"{line['train_loss']:.2f}", str(moving[1]["words"])]
            for runs in (moving, still):
                cells += [_share(runs[1]), _share(runs[4])]
                cells.append(", ".join(map(str, runs[4]["right_by_part"])))
            rows.append(_row(cells))
    return "\n".join(rows)


def gate_table(lines: Sequence[Line]) -> str:
    """Mean gates by place, the share of bytes with a gate above a half, and the histogram."""
    rows = [
        "| model | seed | layer | place | bytes | mean gate | above 0.5 "
        "| bytes by tenth of the gate, % |",
        "|---" * 8 + "|",
    ]
    for line in _by_name(lines):
        for layer, places in line.get("gates", {}).items():
            for place, found in places.items():
                counts = found["histogram"]
                share = sum(counts[len(counts) // 2 :]) / max(found["bytes"], 1)
                cells = [*_name(line), layer, place, str(found["bytes"])]
                tenths = [100 * count / max(found["bytes"], 1) for count in counts]
                shown = ", ".join(f"{tenth:.0f}" for tenth in tenths)
                rows.append(_row([*cells, f"{found['mean']:.2f}", f"{share:.2f}", shown]))
    return "\n".join(rows)


def longbench_table(lines: Sequence[Line]) -> str:
    """Perplexity of LongBench's answers by task, and the difference over all samples."""
    chosen = [line for line in lines if "longbench" in line]
    tasks = list(chosen[0]["longbench"]["tasks"]) if chosen else []
    rows = [
        f"| model | seed | {' | '.join(tasks)} | samples | difference, nats |",
        "|---" * (len(tasks) + 4) + "|",
    ]
    seeds: dict[str, list[float]] = {}
    for line in chosen:
        name, seed = _name(line)
        found, change = line["longbench"]["tasks"], line["longbench"]["difference"]
        seeds.setdefault(name, []).append(change[0])
        shown = [f"{found[task][1]:.2f}, {found[task][2]:.2f}" for task in tasks]
        samples = str(sum(found[task][0] for task in tasks))
        rows.append(_row([name, seed, *shown, samples, _interval(*change)]))
    for name, changes in seeds.items():
        if len(changes) > 1:
            mean = over_seeds(changes, digits=4)
            rows.append(_row([name, f"mean of {len(changes)}", *[""] * len(tasks), "", mean]))
    return "\n".join(rows)


def continual_table(lines: Sequence[Line], domains: Sequence[str]) -> str:
    rows = [
        f"| model | seed | {' | '.join(domains)} | adaptation | forgetting | unseen |",
        "|---" * (len(domains) + 5) + "|",
    ]
    for line in lines:
        if "continual" not in line:
            continue
        results = line["continual"]
        losses = np.asarray(results["loss"])
        own = [losses[number + 1, number] - losses[0, number] for number in range(len(domains))]
        end = losses[-1] - losses[0]
        cells = [*_name(line)]
        cells += [f"{now:.3f}, {later:.3f}" for now, later in zip(own, end, strict=True)]
        cells += [f"{results[key]:.4f}" for key in ("adaptation", "forgetting", "unseen")]
        rows.append(_row(cells))
    return "\n".join(rows)


def over_seeds(
    values: Sequence[float], *, digits: int = 2, least: float = -np.inf, most: float = np.inf
) -> str:
    """Mean of a number of seeds and its 95 % interval by Student's t, from `least` to `most`."""
    return format(stored.over_seeds(values).clipped(least, most), f".{digits}f")


def _share(run: Line) -> str:
    return _interval(run["accuracy"], *run["interval"], digits=2)


def _interval(mean: float, low: float, high: float, *, digits: int = 4) -> str:
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
