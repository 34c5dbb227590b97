"""Tables and pictures of the lines that `mqar.py` wrote."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fwpkm_jax.evaluation.display.plot_style import BLUE, GREY, TEXT, set_title, style_axes
from lab.comparison.mqar import best_rate
from lab.comparison.small_decoders import Row
from lab.study.tables import over_seeds


def of_seeds(shares: Sequence[float]) -> str:
    """The mean; of three seeds or more with its 95 % interval; of several, the worst in brackets.

    The interval is that of Student's t, from 0 to 1 at most.
    """
    if len(shares) > 2:
        shown = over_seeds(shares, digits=3, least=0, most=1)
    else:
        shown = f"{np.mean(shares):.3f}"
    return shown + f" ({min(shares):.3f})" * (len(shares) > 1)


def rows_by_settings(path: Path) -> list[list[Row]]:
    """The rows of a file; those of equal settings together, in order of appearance."""
    groups = defaultdict[str, list[Row]](list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups[json.dumps(row["settings"])].append(row)
    return list(groups.values())


def chosen(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By memory, the runs at the rate with the best validation of the first seed."""
    found = dict[str, list[Row]]()
    for name in dict.fromkeys(row["memory"] for row in rows):
        own = [row for row in rows if row["memory"] == name]
        first = [row for row in own if row["seed"] == min(run["seed"] for run in own)]
        rate = best_rate(first)
        found[name] = [row for row in own if row["rate"] == rate]
    return found


def title(row: Row) -> str:
    """The setting in a few words."""
    about = row["settings"]
    pairs, length, _ = about["train"][0]
    kind = f"{pairs} pairs in {length} tokens" if about["setting"] == "cell" else about["setting"]
    size = f"{about['epochs']} epochs of {about['batch_size']} documents per update"
    start = "" if about["decay_start"] == "time_steps" else ", decays start constant"
    return ", ".join((f"{kind}, width {about['width']}, {size}{start}", *changes(about)))


def changes(about: Row) -> list[str]:
    """What settings have beyond the published ones, in words."""
    warmup, tied = about.get("warmup"), about.get("tied_start")
    wide = about.get("head_dim")
    return [
        *[f"{warmup} updates of warm-up"] * bool(warmup),
        *["keys begin as queries"] * bool(tied),
        *[f"heads of {wide} channels"] * bool(wide),
    ]


def mqar_table(rows: Sequence[Row]) -> str:
    """Accuracy on the test's documents by number of pairs, as Markdown, best first.

    Over seeds as in `of_seeds`. Behind the rate is the number of rates that were tried; updates are
    those of the first seed.
    """
    counts = [f"{x['pairs']} pairs" for x in rows[0]["test"]]
    header = ["memory", "state, bytes", "read per token", "rate (tried)", "seeds", *counts]
    header += ["updates", "CPU minutes"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    groups = chosen(rows)

    def shares(runs: Sequence[Row], index: int) -> list[float]:
        return [run["test"][index]["accuracy"] for run in runs]

    def mean(name: str) -> float:
        return float(np.mean([shares(groups[name], i) for i in range(len(counts))]))

    for name in sorted(groups, key=mean, reverse=True):
        runs = groups[name]
        tried = {row["rate"] for row in rows if row["memory"] == name}
        cells = [f"`{name}`", f"{runs[0]['state_bytes']:,}", f"{runs[0]['bytes_touched']:,}"]
        cells += [f"{runs[0]['rate']:g} ({len(tried)})", str(len(runs))]
        for index in range(len(counts)):
            cells.append(of_seeds(shares(runs, index)))
        cells += [str(runs[0]["steps"]), f"{runs[0]['cpu_seconds'] / 60:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rates_table(rows: Sequence[Row]) -> str:
    """Validation accuracy of the first seed by memory and rate; that of the chosen rate is bold."""
    rates = sorted({row["rate"] for row in rows})
    heads = ["memory", *(f"rate {rate:g}" for rate in rates)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, best in sorted(chosen(rows).items()):
        own = [row for row in rows if row["memory"] == name]
        first = min(row["seed"] for row in own)
        found = {row["rate"]: f"{row['valid']:.3f}" for row in own if row["seed"] == first}
        found[best[0]["rate"]] = f"**{found[best[0]['rate']]}**"
        lines.append(f"| `{name}` | {' | '.join(found.get(rate, '') for rate in rates)} |")
    return "\n".join(lines)


def recall_by_seed(rows: Sequence[Row]) -> str:
    """Accuracy on documents of 64 pairs, seed by seed, by settings and memory, as Markdown.

    A column per number of documents in an update, updates of warm-up and start; the memories are
    those that all columns have.
    """
    found = defaultdict[tuple[int, str], list[Row]](list)
    for row in rows:
        about = row["settings"]
        words = ", ".join((f"{about['batch_size']} documents", *changes(about)))
        found[about["batch_size"], words].append(row)
    columns = {words: chosen(own) for (_, words), own in sorted(found.items())}
    heads = ["memory", *(f"{words} (rate)" for words in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]

    def shares(runs: Sequence[Row]) -> list[float]:
        tests = (run["test"] for run in sorted(runs, key=lambda run: run["seed"]))
        return [part["accuracy"] for test in tests for part in test if part["pairs"] == 64]

    first = next(iter(columns.values()))
    names = [name for name in first if all(name in groups for groups in columns.values())]
    for name in sorted(names, key=lambda name: -np.mean(shares(first[name]))):
        cells = [f"`{name}`"]
        for groups in columns.values():
            shown = ", ".join(f"{share:.2f}" for share in shares(groups[name]))
            cells.append(f"{shown} ({groups[name][0]['rate']:g})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def label_places(
    points: Mapping[str, tuple[float, float]], *, near: float = 1.3, gap: float = 0.032
) -> dict[str, tuple[float, float]]:
    """Where the name of each point stands, so that names do not lie on one another.

    Args:
      points: state and share of right answers by name.
      near: points whose neighbours' states are within this ratio have their names in one column.
      gap: least distance of two names of a column.
    """
    found: dict[str, tuple[float, float]] = {}
    columns: list[list[str]] = []
    for name in sorted(points, key=lambda name: points[name][0]):
        last = points[columns[-1][-1]][0] if columns else 0.0
        if columns and points[name][0] <= near * last:
            columns[-1].append(name)
        else:
            columns.append([name])
    for column in columns:
        right, height = max(points[name][0] for name in column), np.inf
        for name in sorted(column, key=lambda name: -points[name][1]):
            height = min(points[name][1], height - gap)
            found[name] = right, float(height)
    return found


def mqar_picture(groups: Sequence[Sequence[Row]]) -> Figure:
    """Draws accuracy against bytes of state, and beside it against bytes read per token.

    A row of panels per setting, a point per memory. Settings with one number of pairs, with fewer
    than five memories, or whose decays begin in another way than the default are only in the
    tables, if there is another setting.
    """

    def told(rows: Sequence[Row]) -> bool:
        default = rows[0]["settings"]["decay_start"] == "time_steps"
        return default and len(rows[0]["test"]) > 1 and len(chosen(rows)) >= 5

    groups = [rows for rows in groups if told(rows)] or groups
    figure = Figure(figsize=(11, 5.2 * len(groups)), layout="constrained")
    kinds = {"state_bytes": "KiB of state per sequence", "bytes_touched": "KiB read per token"}
    panels = figure.subplots(len(groups), 2, squeeze=False, sharey=True)
    for (left, *others), rows in zip(panels, groups, strict=True):
        for axes, (kind, label) in zip((left, *others), kinds.items(), strict=True):
            _points(axes, chosen(rows), kind)
            axes.set_xlabel(label, fontsize=8, color=TEXT)
        left.set_ylabel("answers right, mean of all numbers of pairs", fontsize=8, color=TEXT)
        set_title(left, f"MQAR: {title(rows[0])}", "")
    return figure


def _points(axes: Axes, runs_of: Mapping[str, Sequence[Row]], kind: str) -> None:
    """A memory's mean over seeds, with a line from the worst to the best, and its name."""
    points: dict[str, tuple[float, float]] = {}
    for name, runs in runs_of.items():
        shares = [np.mean([part["accuracy"] for part in run["test"]]) for run in runs]
        where = runs[0][kind] / 1024, float(np.mean(shares))
        axes.plot(*where, "o", ms=4, color=BLUE)
        axes.vlines(where[0], min(shares), max(shares), color=BLUE, lw=1)
        points[name] = where
    places = label_places(points)
    first = min(place for place, _ in places.values())
    alone = [place for place, _ in places.values()].count(first) == 1
    for name, (place, height) in places.items():
        left = alone and place == first  # On the other side are the names' lines.
        axes.annotate(
            *(name, points[name]),
            xytext=(place / 1.06 if left else place * 1.06, height),
            **{"fontsize": 6, "color": TEXT, "va": "center", "ha": "right" if left else "left"},
            arrowprops={"arrowstyle": "-", "lw": 0.3, "color": GREY, "relpos": (left, 0.5)},
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda kib, _: f"{kib:g}")
    axes.margins(x=0.15)
    style_axes(axes)
    axes.set_ylim(-0.03, 1.08)
