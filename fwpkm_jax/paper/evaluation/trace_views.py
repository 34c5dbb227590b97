"""The table and the page of a slot trace."""

from pathlib import Path
from typing import Any

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.tables import Record, format_table

_STYLE = """
.told { font-size: 1.05rem; padding: .6rem .9rem; border-left: 4px solid; }
.told.right { border-color: #2a8f4f; background: #eef8f1; }
.told.wrong { border-color: #c96a00; background: #fdf4e8; }
.grid td, .grid th { text-align: center; padding: .35rem .6rem; border: 1px solid #ddd; }
.slots { width: 100%; }
.slots td, .slots th { padding: .15rem .8rem .15rem .3rem; white-space: pre; }
.slots th.number { text-align: right; }
.slots td.text { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .82rem; }
.slots tr.hit { background: #dff3e5; }
.target { font-weight: 700; padding: 0 .15rem; outline: 1px solid #888; }
.hit .target { background: #2a8f4f; color: #fff; outline: none; }
.bar { display: inline-block; height: .7rem; background: #0072b2; margin-right: .4rem; }
.hit .bar { background: #2a8f4f; }
details { margin: .3rem 0 .8rem; }
summary { cursor: pointer; font-weight: 600; }
"""


def table(record: Record) -> str:
    """A table of hits, their weight and the gate, by token of the answer and memory layer."""
    results = record["results"]
    header = ["answer token", "expected", "generated", "memory", "hits", "hit weight", "gate"]
    rows = [
        [
            str(number + 1),
            token["expected"],
            _plain(token["generated"]),
            layer,
            f"{_hits(read)} of {len(read['slots'])}",
            f"{read['hit_weight']:.3f}",
            f"{read['gate']:.3f}",
        ]
        for number, token in enumerate(results["tokens"])
        for layer, read in token["layers"].items()
    ]
    return f"Slot trace: {_outcome(record)}\n{format_table(header, rows)}"


def plot(record: Record, directory: Path) -> list[Path]:
    """Writes `trace.html`: for each token of the answer, the slots read and their contents."""
    results, config, told = record["results"], record["config"], _outcome(record)
    sample = results["sample"]
    readings, digits = config["readings"], len(results["tokens"])
    kind = "right" if results["exact"] else "wrong"
    others = "; ".join(sample["other_needles"]) or "none"
    body = [
        f'<p class="told {kind}">{html.escape(told[0].upper() + told[1:])}</p>',
        html.paragraph(
            f"The model read a text of {sample['words']:,} words {readings} "
            f"{'time' if readings == 1 else 'times'}, with sentences about secret numbers hidden "
            "in it, and was then asked for one of them. Whatever lies beyond its attention can "
            "only come from its fast memories: tables of slots that are rewritten while the text "
            "is read. Each token picks a few slots, and what is written there is the token that "
            "follows. A slot is a hit when the token last written into it is the right next token "
            "of the answer."
        ),
        html.table(
            ["", ""],
            [
                ["hidden sentence", f"{sample['needle']} (at {sample['depth']:.0f} % of the text)"],
                ["question", sample["question"].strip()],
                ["right answer", sample["answer"]],
                ["model's answer", results["answer"]],
                ["the other hidden sentences", others],
                ["text", sample["document"]],
                [
                    "slots ever written",
                    ", ".join(
                        f"{_name(layer)}: {count:,} of {results['slots']:,}"
                        for layer, count in results["written_slots"].items()
                    ),
                ],
            ],
        ),
        html.heading("At a glance"),
        html.paragraph(
            "For each token of the answer and each memory: the weight of the hits among all slots "
            "read (the greener the more), how many there were, and the gate, "
            + (
                "the share of the memory's answer in what the layer passes on."
                if results["gate_mixes"]
                else "which this model does not use: it adds the memory's answer in full."
            )
        ),
        _glance(results),
    ]
    for number, token in enumerate(results["tokens"], start=1):
        right = "right" if token["generated"] == token["expected"] else "wrong"
        body.append(
            html.heading(
                f"Token {number} of {digits}: should be {token['expected']}, was "
                f"{_plain(token['generated'])} ({right})"
            )
        )
        if number == 1:
            body.append(
                html.paragraph(
                    "Slots by their weight in the read. The text column shows the surroundings of "
                    "the token last written into the slot, which is framed; the token before it "
                    "chose the slot. Score: how well the slot matched that token, unnormalised. "
                    "Writers: tokens that wrote into the slot in the same write, of which the last "
                    "is shown; a slot of several holds their mean, so that an answer may be right "
                    "with few hits. Writes ago: 0 is the latest reading of the text.",
                    kind="small",
                )
            )
        body += [_slots(layer, read) for layer, read in token["layers"].items()]
    page = html.page("What the memory held when it answered", *body, style=_STYLE)
    return [html.save_page(page, directory / "trace.html")]


def _glance(results: Record) -> str:
    tokens = results["tokens"]
    head = "".join(
        f"<th>{html.escape(token['expected'])}"
        f'<div class="small">{html.escape(_plain(token["generated"]))}</div></th>'
        for token in tokens
    )
    rows = []
    for layer in tokens[0]["layers"] if tokens else []:
        cells = []
        for token in tokens:
            read = token["layers"][layer]
            weight = min(max(read["hit_weight"], 0.0), 1.0)
            cells.append(
                f'<td style="background: rgba(42, 143, 79, {0.55 * weight:.2f})">'
                f"{read['hit_weight']:.2f}"
                f'<div class="small">{_hits(read)} of {len(read["slots"])}, '
                f"gate {read['gate']:.2f}</div></td>"
            )
        rows.append(f"<tr><th>{html.escape(_name(layer))}</th>{''.join(cells)}</tr>")
    first = '<th>should be<div class="small">was</div></th>'
    return html.scrollable(
        f'<table class="grid">\n<tr>{first}{head}</tr>\n' + "\n".join(rows) + "\n</table>"
    )


def _slots(layer: str, read: Record) -> str:
    columns = ("slot", "weight", "last written there", "score", "writers", "writes ago")
    numbers = ("slot", "score", "writers", "writes ago")
    head = "".join(
        f"<th{' class=number' if name in numbers else ''}>{name}</th>" for name in columns
    )
    rows = "\n".join(_slot(slot) for slot in read["slots"])
    summary = (
        f"{_name(layer)}: {_hits(read)} of {len(read['slots'])} slots are hits, with weight "
        f"{read['hit_weight']:.2f}; gate {read['gate']:.2f}"
    )
    slots = html.scrollable(f'<table class="slots">\n<tr>{head}</tr>\n{rows}\n</table>')
    return f"<details open><summary>{html.escape(summary)}</summary>\n{slots}</details>"


def _slot(slot: dict[str, Any]) -> str:
    width = 80 * min(max(slot["weight"], 0.0), 1.0)
    cells = [
        f'<td class="number">{slot["slot"]}</td>',
        f'<td><span class="bar" style="width: {width:.0f}px"></span>{slot["weight"]:.3f}</td>',
    ]
    entry = slot["entry"]
    if entry is None:
        cells.append('<td colspan="4" class="small">never written since the checkpoint</td>')
    else:
        before, after = (
            "".join(html.show_token(text) for text in entry[side]) for side in ("before", "after")
        )
        target = html.show_token(entry["target"]) or "\u00b7"
        cells += [
            f'<td class="text">{before}<span class="target">{target}</span>{after}</td>',
            f'<td class="number">{entry["score"]:.2f}</td>',
            *(f'<td class="number">{entry[name]:,}</td>' for name in ("writers", "age")),
        ]
    row = '<tr class="hit">' if slot["hit"] else "<tr>"
    return row + "".join(cells) + "</tr>"


def _hits(read: Record) -> int:
    return sum(slot["hit"] for slot in read["slots"])


def _plain(text: str) -> str:
    """A token's text without line breaks, for a table."""
    return text if text.isprintable() and text.strip() else repr(text)


def _name(layer: str) -> str:
    return layer.replace("_", " ")


def _outcome(record: Record) -> str:
    results = record["results"]
    asked, answer = results["sample"]["answer"], results["answer"]
    tried = f"{results['tried']} sample{'' if results['tried'] == 1 else 's'}"
    if results["exact"]:
        which = (
            "in the first sample" if results["tried"] == 1 else f"the first right one after {tried}"
        )
        return f"the answer {asked} is right, {which}."
    return (
        f"none of {tried} was answered correctly; this is the one with most digits right, "
        f"{results['right']} of {len(asked)}: {answer!r} for {asked}."
    )
