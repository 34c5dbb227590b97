"""Tables of what a device measured, and of accounts of its steps and kernels: see `lab.pages`."""

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]


def steps_table(lines: Sequence[Line]) -> str:
    """A row for each variant of a training step that was timed, in the order of the lines."""
    head = ["model", "variant", "ms", "spread, ms", "samples/s", "loss"]
    rows = [
        [
            f"`{line['model']}`",
            f"`{line['variant']}`",
            f"{line['milliseconds']:.1f}",
            f"{line['milliseconds_spread']:.1f}",
            f"{line['samples_per_second']:.0f}",
            f"{line['final_loss']:.4f}",
        ]
        for line in lines
        if "milliseconds" in line
    ]
    return _table(head, rows)


def account_table(lines: Sequence[Line]) -> str:
    """The classes of one step, of the account before a change, then of the one after it.

    The times measured before stand beside those after it where both are of one device. Of a step
    that was not measured since, the classes that changed are given.

    Raises:
      ValueError: there are not two accounts.
    """
    if len(lines) != 2:
        raise ValueError(f"there are {len(lines)} accounts; name two files and one model.")
    before, after = ({row["class"]: row for row in (*line["rows"], _all(line))} for line in lines)
    is_measured = "measured_on" in lines[1]
    device = lines[1]["measured_on"] if is_measured else lines[0]["measured_on"]
    same_device = is_measured and lines[0].get("measured_on") == device
    rows = []
    for kind in dict.fromkeys((*[k for k in after if k != "all"], *before, "all")):
        old, new = before.get(kind, {}), after.get(kind, {})
        now, then = (
            [
                f"{one.get('launches', 0):,.0f}",
                f"{one.get('gigabytes', 0):.1f}",
                f"{one.get(f'{device}_ms', 0):.1f}",
            ]
            for one in (new, old)
        )
        cells = [kind, *(f"{a} ({b})" for a, b in zip(now, then, strict=True))]
        if is_measured:
            cells.append(f"{new.get('measured_ms', 0):.1f}")
        elif kind != "all" and now == then:
            continue
        rows.append([*cells, *([f"{old.get('measured_ms', 0):.1f}"] if same_device else [])])
    head = ["class", "launches (before)", "GB (before)", f"{device.upper()} by the cost model, ms"]
    head[-1] += " (before)"
    head += ["measured, ms"] * is_measured + ["before, ms"] * same_device
    return _table(head, rows)


def schedule_table(lines: Sequence[Line]) -> str:
    """The kernels of a TPU, of a schedule before a change, then of the one after it.

    Raises:
      ValueError: a kernel is not in two schedules.
    """
    found: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        if "bundles" in line:
            found.setdefault((line["device"], line["size"], line["kernel"]), []).append(line)
    if wrong := [of for of, both in found.items() if len(both) != 2]:
        raise ValueError(f"{wrong} are not in two schedules.")
    rows = [
        [
            device,
            size,
            f"`{kernel}`",
            f"{new['million_cycles']:.1f} ({old['million_cycles']:.1f})",
            f"{new['used']['MXU']:.2f} ({old['used']['MXU']:.2f})",
            f"{new['megabytes']:,.0f} ({old['megabytes']:,.0f})",
        ]
        for (device, size, kernel), (old, new) in found.items()
    ]
    head = ["TPU", "size", "kernel", "million cycles (before)", "share of the unit for products"]
    head[-1] += " (before)"
    return _table([*head, "MB (before)"], rows)


def _all(line: Line) -> Line:
    return {"class": "all", **line["total"]}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
