"""Tables and picture of what ways to write keep, from the lines of `lab.study.retention`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fwpkm_jax.evaluation.intervals import clustered_mean
from lab.study.tables import over_seeds

Line = dict[str, Any]
PLAIN = "plain"


def facts_table(lines: Sequence[Line]) -> str:
    """Shares of right answers of each way to write: means over the runs, and in how many it is at
    least that of the plain write."""
    facts = [line for line in lines if line["measure"] == "facts"]
    if not facts:
        return ""
    text, other = _moments(facts)
    times = facts[0]["settings"]["readings"]
    columns = {"told once": "told_1", f"told {times} times": "told"}
    columns |= {_named(text): text, _named(other): other, "new facts, told once": "new_1"}
    rows = [f"| write | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    plain = {line["run"]: line for line in facts if line["method"] == PLAIN}
    for name in _methods(facts):
        own = [line for line in facts if line["method"] == name]
        cells = [name]
        for moment in columns.values():
            values = [_share(line, moment) for line in own]
            theirs = [_share(plain[line["run"]], moment) for line in own]
            cells.append(_mean_and_count(values, theirs, name, better=np.greater_equal))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def forgetting_table(lines: Sequence[Line]) -> str:
    """Answers lost of those that were right: means over the runs, in how many it is at most half
    that of the plain write, and the difference from it."""
    facts = [line for line in lines if line["measure"] == "facts"]
    if not facts:
        return ""
    text, other = _moments(facts)
    rows = [
        f"| write | lost: {_named(text)} | minus plain | lost: {_named(other)} | minus plain |"
        f" new facts, told {facts[0]['settings']['readings']} times |",
        "|---" * 6 + "|",
    ]
    plain = {line["run"]: line for line in facts if line["method"] == PLAIN}

    for name in _methods(facts):
        own = [line for line in facts if line["method"] == name]
        cells = [name]
        for moment in (text, other):
            values = [forgotten(line, moment) for line in own]
            theirs = [forgotten(plain[line["run"]], moment) for line in own]
            cells.append(_mean_and_count(values, theirs, name, better=_halved))
            cells.append("" if name == PLAIN else _against_plain(own, plain, moment))
        values = [_share(line, "new") for line in own]
        theirs = [_share(plain[line["run"]], "new") for line in own]
        cells.append(_mean_and_count(values, theirs, name, better=np.greater_equal))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def domains_table(lines: Sequence[Line]) -> str:
    """Adaptation and forgetting in nats of each way to write, over the runs, by order.

    Means of several runs have a 95 % interval. Behind it, in how many runs adaptation is at least
    that of the plain write, and forgetting at most half of it. "Minus plain" is the difference to
    the plain write of the same run.
    """
    domains = [line for line in lines if line["measure"] == "domains"]
    domains += _over_orders(domains)
    rows = [
        "| write | order | text of each domain | runs | adaptation | minus plain "
        "| forgetting | minus plain |",
        "|---" * 8 + "|",
    ]

    def kind(line: Line) -> tuple[int, str]:
        return line["batches"], line["order"]

    plain = {(kind(x), x["run"]): x for x in domains if x["method"] == PLAIN}
    groups = {(kind(x), x["method"]): None for x in domains}
    for group, name in sorted(groups, key=lambda found: (found[0], found[1] != PLAIN)):
        own = [x for x in domains if (kind(x), x["method"]) == (group, name)]
        size = own[0]["change"]["bytes"][0] / 1000
        cells = [name, group[1], f"{size:.0f} kB", str(len(own))]
        for key, better in (("adaptation", np.less_equal), ("forgetting_mean", _halved)):
            values = [line["change"][key][0] for line in own]
            theirs = [plain[group, x["run"]]["change"][key][0] for x in own]
            cells.append(_over_runs(values) + _count(values, theirs, name, better=better))
            cells.append(_minus_plain(values, theirs, name))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def without_plain(lines: Sequence[Line]) -> list[str]:
    """Runs and measures, with the order of the domains, that have no plain write beside them."""
    names = ("run", "measure", "order", "batches")
    compared = [line for line in lines if line["measure"] != "cost"]
    found = [(tuple(line.get(name) for name in names), line["method"]) for line in compared]
    plain = {about for about, method in found if method == PLAIN}
    lacking = dict.fromkeys(about for about, _ in found if about not in plain)
    return [" ".join(str(x) for x in about if x is not None) for about in lacking]


def each_domain_table(lines: Sequence[Line]) -> str:
    """By run and order, each domain's change with the plain write when just read and at the end,
    with intervals."""
    own = [x for x in lines if x["measure"] == "domains" and x["method"] == PLAIN]
    rows = ["| run, order | domain | just read | at the end | forgetting |", "|---" * 5 + "|"]
    for line in own:
        change = line["change"]
        lost = [*change["forgetting"], None]  # Nothing follows the last domain.
        each = zip(change["domains"], change["own"], change["end"], lost, strict=True)
        for domain, just, end, forgetting in each:
            _, seed, rest = line["run"].rpartition("seed")
            cells = [f"{seed}{rest}, {line['order']}", domain]
            cells += [_interval(x) if x else "" for x in (just, end, forgetting)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def unread_table(lines: Sequence[Line]) -> str:
    """Changes in nats of domains that no one reads, and of those just read at the same moments,
    means over these moments, with each way to write."""
    rows = ["| write | run | order | unread domain | change | just read |", "|---" * 6 + "|"]
    for line in (x for x in lines if x["measure"] == "domains"):
        change = line["change"]
        just = np.mean([mean for mean, *_ in change["own"]])
        control = zip(change.get("unread", ()), change.get("unread_changes", ()), strict=True)
        for domain, moments in control:
            cells = [line["method"], line["run"], line["order"], domain]
            cells += [f"{np.mean([mean for mean, *_ in moments]):.4f}", f"{just:.4f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def beside_plain_table(lines: Sequence[Line]) -> str:
    """Each domain's change with every way to write, over the runs, by order.

    What is forgotten "minus plain" is the difference to the plain write of the same run.
    """
    domains = [line for line in lines if line["measure"] == "domains"]
    plain = {(x["order"], x["batches"], x["run"]): x for x in domains if x["method"] == PLAIN}
    names = ("domain", "order", "write", "runs", "just read", "at the end", "forgetting")
    rows = [f"| {' | '.join((*names, 'minus plain'))} |", "|---" * 8 + "|"]
    for order, batches in dict.fromkeys((x["order"], x["batches"]) for x in domains):
        of_group = [x for x in domains if (x["order"], x["batches"]) == (order, batches)]
        named = of_group[0]["change"]["domains"]

        def means(of: Sequence[Line], key: str, number: int) -> list[float]:
            return [x["change"][key][number][0] for x in of]

        for (number, domain), name in itertools.product(enumerate(named), _methods(of_group)):
            own = [x for x in of_group if x["method"] == name]
            cells = [domain, order, name, str(len(own))]
            cells += [_over_runs(means(own, key, number)) for key in ("own", "end")]
            if number + 1 < len(named):  # Nothing follows the last domain.
                lost = means(own, "forgetting", number)
                theirs = means([plain[order, batches, x["run"]] for x in own], "forgetting", number)
                cells += [_over_runs(lost), _minus_plain(lost, theirs, name)]
            else:
                cells += ["", ""]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def text_table(lines: Sequence[Line]) -> str:
    """Loss in nats of unseen text by way to write, and its difference from the plain write's, with
    an interval over documents and runs."""
    own_lines = [line for line in lines if line["measure"] == "text"]
    rows = ["| write | runs | loss | minus plain |", "|---" * 4 + "|"]
    plain = {line["run"]: line["text"] for line in own_lines if line["method"] == PLAIN}
    for name in _methods(own_lines):
        own = [line for line in own_lines if line["method"] == name]
        labels = np.concatenate([line["text"]["labels"] for line in own])
        sums = labels * np.concatenate([line["text"]["losses"] for line in own])
        theirs = labels * np.concatenate([plain[line["run"]]["losses"] for line in own])
        mean, interval = clustered_mean(sums - theirs, labels)
        assert interval is not None, "several documents are read"
        gap = "" if name == PLAIN else _interval((mean, interval.low, interval.high))
        rows.append(f"| {name} | {len(own)} | {sums.sum() / labels.sum():.4f} | {gap} |")
    return "\n".join(rows)


def cost_table(lines: Sequence[Line]) -> str:
    """CPU time of eight rows and bytes beyond the plain write's, of each way to write."""
    rows = [
        "| write | CPU ms for 8 rows, the fastest turn | times plain | more bytes |",
        "|---|---|---|---|",
    ]
    costs = [line for line in lines if line["measure"] == "cost"]
    plain = next((x["cpu_milliseconds"] for x in costs if x["method"] == PLAIN), None)
    for line in costs:
        spent = line["cpu_milliseconds"]
        times = "" if plain is None else f"{spent / plain:.2f}"
        cells = (line["method"], f"{spent:.1f}", times, str(line["history_bytes"]))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def draw(path: Path, lines: Sequence[Line], *, control: Sequence[str]) -> None:
    """Forgetting against what is learned: a point for each way and run, the control as a curve.

    A measure without the control is left out where another has it.

    Args:
      path: file of the picture.
      lines: of both measures.
      control: names of the plain write at several sizes of step, in order.
    """
    from matplotlib.figure import Figure

    facts = [line for line in lines if line["measure"] == "facts"]
    domains = [line for line in lines if line["measure"] == "domains"]
    least = min((line["batches"] for line in domains), default=0)
    domains = [line for line in domains if line["batches"] == least]
    panels: list[tuple[str, str, Sequence[Line], Callable[[Line], tuple[float, float]]]] = []
    if facts:
        for moment in _moments(facts):
            panels.append(
                (
                    "new facts known after one reading",
                    f"lost {_named(moment)}",
                    facts,
                    lambda line, moment=moment: (
                        _share(line, "new_1"),
                        forgotten(line, moment),
                    ),
                )
            )
    if domains:
        panels.append(
            (
                "adaptation, nats gained (mean of orders)",
                "forgetting, nats (mean of orders)",
                _over_orders(domains) or domains,  # There may be one order only.
                lambda line: (
                    -line["change"]["adaptation"][0],
                    line["change"]["forgetting_mean"][0],
                ),
            )
        )
    smaller = set(control[1:])
    panels = [one for one in panels if any(x["method"] in smaller for x in one[2])] or panels
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(9, 5.5 * columns), 4 * rows + 2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    drawn = {line["method"] for *_, found, _ in panels for line in found}
    names = [name for name in dict.fromkeys(line["method"] for line in lines) if name in drawn]
    markers = "osv^D<>PX*hpd8"
    for axis, (x_label, y_label, found, point) in zip(axes, panels, strict=False):
        for number, name in enumerate(names):
            points = np.array([point(line) for line in found if line["method"] == name])
            if len(points):
                style = {"color": f"C{number % 10}", "marker": markers[number % len(markers)]}
                axis.scatter(*points.T, s=28, **style)
        curve = [
            np.mean([point(line) for line in found if line["method"] == name], axis=0)
            for name in control
            if any(line["method"] == name for line in found)
        ]
        axis.plot(*np.array(curve).T, color="0.4", zorder=0)
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.3)
    for number, name in enumerate(names):
        style = {"color": f"C{number % 10}", "marker": markers[number % len(markers)]}
        axes[0].scatter([], [], label=name, **style)
    axes[0].plot([], [], color="0.4", label="control: mean over runs, by step")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _methods(lines: Sequence[Line]) -> list[str]:
    """The ways to write, the plain one first."""
    names = dict.fromkeys(line["method"] for line in lines)
    return sorted(names, key=lambda name: name != PLAIN)


def _halved(own: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    return own <= theirs / 2


def forgotten(line: Line, moment: str) -> float:
    """Share of answers that were right after the telling and no longer are."""
    return _share(line, "told") - _share(line, moment)


def _share(line: Line, moment: str) -> float:
    return line["facts"][moment]["exact"]


def _moments(facts: Sequence[Line]) -> tuple[str, str]:
    """The last moments after other text and after other facts."""

    def last(kind: str) -> str:
        names = [name for name in facts[0]["facts"] if name.startswith(f"{kind}_")]
        return max(names, key=lambda name: int(name.partition("_")[2]))

    return last("text"), last("facts")


def _named(moment: str) -> str:
    kind, _, number = moment.partition("_")
    return f"after {number} {'texts' if kind == 'text' else 'haystacks with other facts'}"


def _mean_and_count(
    values: Sequence[float], plain: Sequence[float], name: str, *, better: Callable[..., Any]
) -> str:
    return f"{np.mean(values):.2f}{_count(values, plain, name, better=better)}"


def _count(
    values: Sequence[float], plain: Sequence[float], name: str, *, better: Callable[..., Any]
) -> str:
    """In how many runs a way is better than the plain write, which has nothing beside it."""
    if name == PLAIN:
        return ""
    return f" ({np.sum(better(np.asarray(values), np.asarray(plain)))} of {len(values)})"


def _against_plain(own: Sequence[Line], plain: dict[str, Line], moment: str) -> str:
    """What is forgotten minus what the plain write forgets, with an interval over people."""

    def lost(line: Line) -> np.ndarray:
        told, later = (np.asarray(line["facts"][name]["right"]) for name in ("told", moment))
        return told - later

    questions = own[0]["facts"][moment]["questions"] / len(own[0]["facts"][moment]["right"])
    difference = np.concatenate([lost(line) - lost(plain[line["run"]]) for line in own])
    mean, interval = clustered_mean(difference / questions, np.ones(len(difference)))
    assert interval is not None, "several people are told facts"
    return f"{mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _minus_plain(values: Sequence[float], plain: Sequence[float], name: str) -> str:
    """The difference to the plain write of the same runs, which has nothing beside it."""
    return "" if name == PLAIN else _over_runs(np.subtract(values, plain).tolist())


def _over_runs(values: Sequence[float]) -> str:
    """The mean, of several runs with its 95 % interval, in nats."""
    return over_seeds(values, digits=4) if len(values) > 1 else f"{values[0]:.4f}"


def _interval(values: Sequence[float]) -> str:
    return "{:.4f} [{:.4f}, {:.4f}]".format(*values)


def _over_orders(domains: Sequence[Line]) -> list[Line]:
    """By way, run and size, the means over the orders, where there are all of the plain write."""
    found: dict[tuple[str, int, str], dict[str, Line]] = {}
    for line in domains:
        of_way = found.setdefault((line["run"], line["batches"], line["method"]), {})
        of_way[line["order"]] = line["change"]
    lines = []
    for (run, batches, method), changes in found.items():
        if len(changes) > 1 and changes.keys() == found[run, batches, PLAIN].keys():
            mean = {
                key: [float(np.mean([change[key][0] for change in changes.values()]))]
                for key in ("adaptation", "forgetting_mean")
            }
            mean["bytes"] = next(iter(changes.values()))["bytes"]
            about = {"run": run, "batches": batches, "method": method, "order": "over orders"}
            lines.append(about | {"change": mean})
    return lines
