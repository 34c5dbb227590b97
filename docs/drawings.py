"""Draws how a memory works: `python docs/drawings.py` writes the SVG files of docs/images again.

A drawing brings its own panel and both sets of colours, so it is readable on a page of either
theme. It is 400 units wide, and its smallest text is readable when it is shown 400 pixels wide.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
WIDTH = 400

STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --panel: #ffffff; --edge: #c8ccd0; --text: #1f2328; --soft: #57606a; --empty: #eef0f2;
  --row: #0072b2; --column: #b35900; --read: #007a5e; --error: #b3261e; --target: #7b4fa3; }
@media (prefers-color-scheme: dark) {
  svg { --panel: #1c2026; --edge: #4a525b; --text: #e6e8ea; --soft: #a9b2bc; --empty: #2f363e;
    --row: #5bb4e8; --column: #f0a04b; --read: #3fc9a4; --error: #ff8a7f;
    --target: #c3a0e8; } }
text { fill: var(--text); } .soft { fill: var(--soft); } .strong { font-weight: 600; }
.panel { fill: var(--panel); stroke: var(--edge); } .empty { fill: var(--empty); }
.box { fill: var(--empty); stroke: var(--soft); }
.row { fill: var(--row); } .column { fill: var(--column); } .read { fill: var(--read); }
.error { fill: var(--error); } .target { fill: var(--target); }
path { fill: none; stroke: var(--soft); stroke-width: 1.5; }
path.row { stroke: var(--row); fill: none; } path.column { stroke: var(--column); fill: none; }
path.read { stroke: var(--read); fill: none; } path.error { stroke: var(--error); fill: none; }
.head { fill: var(--soft); } .plus { fill: var(--panel); stroke: var(--soft); }
.frame { fill: none; stroke: var(--soft); stroke-dasharray: 5 4; }
.faint { fill-opacity: .28; }
"""


class Drawing:
    """Shapes in the order in which they are drawn.

    Args:
      height: of the drawing; it is `WIDTH` wide.
      title: what it shows, for those who do not see it.
    """

    def __init__(self, height: int, title: str):
        self._height, self._title, self._shapes = height, title, []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "panel", radius=8)

    def box(self, x: float, y: float, width: float, height: float, kind: str, *, radius=2.0):
        """A rectangle whose corner is at `x`, `y`."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, *lines: str, kind: str = "", anchor: str = "start"):
        """Lines of text, 16 units apart; the first one's baseline is at `y`."""
        for number, line in enumerate(lines):
            self._shapes.append(
                f'<text class="{kind}" x="{x:g}" y="{y + 16 * number:g}" '
                f'text-anchor="{anchor}">{escape(line)}</text>'
            )

    def circle(self, x: float, y: float, sign: str):
        """A small circle around `x`, `y` with a sign in it."""
        self._shapes.append(f'<circle class="plus" cx="{x:g}" cy="{y:g}" r="9"/>')
        self.text(x, y + 4.5, sign, anchor="middle")

    def arrow(self, *points: tuple[float, float], kind: str = ""):
        """A line through the points with a head at its end."""
        (x, y), (end_x, end_y) = points[-2:]
        size = 5
        across = abs(end_x - x) > abs(end_y - y)
        sign = (1 if end_x > x else -1) if across else (1 if end_y > y else -1)
        back = (end_x - sign * size, end_y) if across else (end_x, end_y - sign * size)
        line = "L".join(f"{a:g} {b:g}" for a, b in (*points[:-1], back))
        dx, dy = (0, size) if across else (size, 0)
        self._shapes.append(f'<path class="{kind}" d="M{line}"/>')
        self._shapes.append(
            f'<polygon class="{kind or "head"}" points="{end_x:g},{end_y:g} '
            f'{back[0] - dx:g},{back[1] - dy:g} {back[0] + dx:g},{back[1] + dy:g}"/>'
        )

    def svg(self) -> str:
        """The file's text."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'width="{WIDTH}" height="{self._height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                *self._shapes,
                "</svg>",
                "",
            ]
        )


CELLS, CELL = 8, 15
BEST_ROWS, BEST_COLUMNS = (2, 5), (1, 6)
SLOTS = ((2, 1), (2, 6), (5, 6))
"""Rows and columns of the slots that the query reads: the best three of the four products."""


def _table(drawing: Drawing, x: float, y: float, kind: str) -> None:
    """The table of slots, the chosen ones of a kind."""
    for row in range(CELLS):
        for column in range(CELLS):
            chosen = (row, column) in SLOTS
            at = x + column * CELL, y + row * CELL
            drawing.box(*at, CELL - 2, CELL - 2, kind if chosen else "empty")


def _bar(drawing: Drawing, x: float, y: float, kind: str) -> None:
    """A vector."""
    for number in range(6):
        drawing.box(x + number * 11, y, 10, 14, kind)


def one_chunk() -> Drawing:
    """One chunk read, written, and read again."""
    drawing = Drawing(
        668,
        "One chunk of tokens. The two halves of a query find rows and columns of sub-keys; their "
        "pairs are slots. The values of the best slots are read and compared with a target. The "
        "error changes these slots. The next chunk reads the changed values.",
    )
    _find(drawing, 0)
    _read(drawing, 222)
    _write(drawing, 362)
    _read_again(drawing, 530)
    return drawing


def _table(drawing: Drawing, x: float, y: float, kind: str) -> None:
    """The table of slots at `x`, `y`; those that the query reads are of a kind."""
    for row in range(CELLS):
        for column in range(CELLS):
            shown = kind if (row, column) in SLOTS else "empty"
            drawing.box(x + column * CELL, y + row * CELL, CELL - 2, CELL - 2, shown)


def _vector(drawing: Drawing, x: float, y: float, *kinds: str) -> None:
    """A vector at `x`, `y`, of six numbers in one colour or in two halves."""
    for number in range(6):
        drawing.box(x + number * 11, y, 10, 14, kinds[number * len(kinds) // 6])


def _find(drawing: Drawing, top: float) -> None:
    x, y = 258, top + 66
    row_y, column_y = y + 2 * CELL + 6, y - 22
    drawing.text(16, top + 28, "1  Find slots", kind="strong")
    drawing.text(16, top + 79, "query", kind="soft")
    _vector(drawing, 58, top + 68, "row", "column")
    drawing.arrow((107, top + 66), (107, column_y + 6), (x - 6, column_y + 6), kind="column")
    drawing.arrow((74, top + 84), (74, row_y), (x - 28, row_y), kind="row")
    for number in range(CELLS):
        row = "row" if number in BEST_ROWS else "row faint"
        column = "column" if number in BEST_COLUMNS else "column faint"
        drawing.box(x - 22, y + number * CELL, CELL - 2, CELL - 2, row)
        drawing.box(x + number * CELL, column_y, CELL - 2, CELL - 2, column)
    _table(drawing, x, y, "read")
    drawing.text(
        *(16, top + 126),
        "One half finds its best rows,",
        "the other its best columns.",
        "Each pair is a slot; the best",
        "pairs are read (top-k).",
        kind="soft",
    )
    drawing.text(x + CELLS * CELL / 2, top + 206, "table of slots", kind="soft", anchor="middle")


def _read(drawing: Drawing, top: float) -> None:
    drawing.text(16, top + 28, "2  Read and compare", kind="strong")
    for number in range(len(SLOTS)):
        _vector(drawing, 16, top + 46 + 20 * number, "read")
    drawing.arrow((88, top + 73), (126, top + 73), kind="read")
    drawing.text(107, top + 64, "sum", kind="soft", anchor="middle")
    for x, kind, sign in ((134, "read", ""), (224, "target", "\u2212"), (314, "error", "=")):
        drawing.text(x - 12, top + 78, sign, anchor="middle")
        _vector(drawing, x, top + 66, kind)
    drawing.text(16, top + 124, "weighted values", kind="soft")
    drawing.text(167, top + 102, "read", kind="soft", anchor="middle")
    drawing.text(257, top + 102, "target: value", "of the next token", kind="soft", anchor="middle")
    drawing.text(347, top + 102, "error", kind="soft", anchor="middle")


def _write(drawing: Drawing, top: float) -> None:
    x, y = 258, top + 20
    drawing.text(16, top + 28, "3  Write", kind="strong")
    drawing.text(
        *(16, top + 56),
        "After the chunk, the values",
        "that were read take one",
        "gradient step on the error;",
        "all others stay.",
        kind="soft",
    )
    _vector(drawing, 16, top + 122, "error")
    drawing.arrow((88, top + 129), (x - 8, top + 129), kind="error")
    _table(drawing, x, y, "error")


def _read_again(drawing: Drawing, top: float) -> None:
    drawing.text(16, top + 24, "4  The next chunk reads the new values", kind="strong")
    for number, (x, name) in enumerate(((16, "chunk 1"), (152, "chunk 2"), (288, "chunk 3"))):
        drawing.box(x, top + 40, 96, 28, "box", radius=4)
        drawing.text(x + 48, top + 59, name, anchor="middle")
        drawing.arrow((x + 26, top + 98), (x + 26, top + 70), kind="read")
        if number < 2:
            drawing.arrow((x + 70, top + 68), (x + 70, top + 98), kind="error")
    drawing.box(16, top + 98, 368, 26, "box", radius=4)
    drawing.text(200, top + 116, "memory", anchor="middle")
    drawing.text(48, top + 88, "read", kind="soft")
    drawing.text(92, top + 88, "write", kind="soft")


def block() -> Drawing:
    """Where a memory layer stands in a language model."""
    drawing = Drawing(
        686,
        "A language model: embedding, blocks and head. A block adds to the residual stream what "
        "the memory layer, then the token mixer, then the MLP make of it. The memory goes into "
        "the memory layer as an argument and comes out changed.",
    )
    stream = 60
    drawing.text(stream, 30, "tokens", anchor="middle")
    drawing.arrow((stream, 36), (stream, 50))
    _step(drawing, 16, 50, 88, "embedding")
    drawing.box(16, 98, 368, 262, "frame", radius=6)
    drawing.text(374, 350, "a block; some have a memory layer", kind="soft", anchor="end")
    drawing.arrow((stream, 78), (stream, 376))
    for y, name in ((122, "memory layer"), (204, "token mixer"), (286, "MLP")):
        drawing.arrow((stream, y + 14), (120, y + 14))
        _step(drawing, 120, y, 112, name)
        drawing.arrow((176, y + 28), (176, y + 44), (stream + 9, y + 44))
        drawing.circle(stream, y + 44, "+")
    drawing.text(246, 214, "attention, Gated", "DeltaNet, ...", kind="soft")
    drawing.text(246, 304, "or PKM, experts", kind="soft")
    drawing.arrow((310, 84), (310, 126), (234, 126), kind="read")
    drawing.text(310, 76, "memory before", kind="soft", anchor="middle")
    drawing.arrow((232, 146), (310, 146), (310, 166), kind="error")
    drawing.text(310, 182, "memory after", kind="soft", anchor="middle")
    _step(drawing, 16, 376, 88, "norm, head")
    drawing.text(118, 395, "predict the next token", kind="soft")
    _inside_layer(drawing, 424)
    return drawing


def _step(drawing: Drawing, x: float, y: float, width: float, name: str) -> None:
    drawing.box(x, y, width, 28, "box", radius=4)
    drawing.text(x + width / 2, y + 19, name, anchor="middle")


def _inside_layer(drawing: Drawing, top: float) -> None:
    """What a memory layer computes."""
    drawing.text(16, top + 20, "In the memory layer", kind="strong")
    drawing.text(200, top + 42, "stream, normed", kind="soft", anchor="middle")
    for x, name in ((16, "query"), (145, "value"), (274, "gate")):
        middle = x + 55
        drawing.arrow((200, top + 48), (200, top + 56), (middle, top + 56), (middle, top + 68))
        _step(drawing, x, top + 68, 110, name)
        drawing.arrow((middle, top + 96), (middle, top + 140))
    drawing.box(16, top + 104, 110, 28, "box", radius=4)
    drawing.text(71, top + 123, "read memory", anchor="middle")
    _step(drawing, 16, top + 140, 368, "gate \u00d7 read + (1 \u2212 gate) \u00d7 value")
    drawing.arrow((200, top + 168), (200, top + 182))
    _step(drawing, 115, top + 182, 170, "norm, projection")
    drawing.text(
        *(200, top + 232),
        "After the chunk: write the error of each read,",
        "weighted by the token\u2019s gate.",
        kind="soft",
        anchor="middle",
    )


DRAWINGS = {"one_chunk": one_chunk, "block": block}
"""The drawings by the name of their file in `IMAGES`."""

if __name__ == "__main__":
    for name, drawing in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(drawing().svg(), encoding="utf-8")
