"""Self-contained HTML pages: one file without scripts or external resources.

The functions escape the text that they take, and return markup.
"""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from fwpkm_jax.io.atomic import write_text

_PAGE_DPI = 96  # CSS pixels.
_BROAD = 800  # Two plots side by side.
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 60rem; margin: 2rem auto 4rem; padding: 0 1.5rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 .6rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0 .8rem; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th { text-align: left; font-weight: 600; border-bottom: 2px solid #999; }
td { border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th, td { padding: .25rem .7rem .25rem 0; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; max-width: 100%; margin: .6rem 0 1rem; }
.pairs td { overflow-wrap: anywhere; min-width: 7rem; }
pre, code, .mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
pre { font-size: .85rem; overflow-x: auto; }
.small { font-size: .85rem; color: #666; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) {
  body { margin: 1rem auto 3rem; padding: 0 1rem; }
  pre { font-size: .7rem; }
}
"""


def escape(text: object) -> str:
    """The text with HTML's special characters and quotes escaped."""
    return html.escape(str(text))


def page(title: str, *body: str, style: str = "") -> str:
    """The markup of a whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """A heading within the page."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of text; `kind` names its CSS class, such as "small"."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, kind: str = "") -> str:
    """A table of texts; numbers are aligned to the right.

    A table that is wider than the page gets its own scroll bar.

    Args:
      header: titles of the columns.
      rows: entries; each int or float is shown as a number with thousands separators.
      kind: CSS class of the table; "pairs" is for names and values and breaks long words.
    """
    head = "".join(f"<th>{escape(entry)}</th>" for entry in header)
    lines = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    start = f'<table class="{escape(kind)}">' if kind else "<table>"
    return scrollable(f"{start}\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>")


def scrollable(markup: str) -> str:
    """The markup in a box with a horizontal scroll bar if it is wider than the page."""
    return f'<div class="wide">{markup}</div>'


def image(path: Path, *, description: str, dpi: int) -> str:
    """Markup that embeds a PNG file of `dpi` pixels per inch at its natural size.

    It has the class "broad" where it is too broad to be made as narrow as a phone.
    """
    content = path.read_bytes()
    width = int.from_bytes(content[16:20], "big") * _PAGE_DPI // dpi  # From the PNG's header.
    encoded = base64.b64encode(content).decode()
    kind = ' class="broad"' if width > _BROAD else ""
    return (
        f'<img{kind} src="data:image/png;base64,{encoded}" width="{width}" '
        f'alt="{escape(description)}">'
    )


def show_token(text: str) -> str:
    """A token's text as markup; line ends, tabs and other invisible characters become visible."""
    names = {"\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d"}
    shown = "".join(names.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)
    return escape(shown)


def save_page(markup: str, path: Path) -> Path:
    """Writes a page completely or not at all; creates its folder if needed; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Values of JSON files may hold halves of surrogate pairs, which UTF-8 has not.
    write_text(path, markup.encode("utf-8", "replace").decode())
    return path


def _cell(entry: object) -> str:
    number = isinstance(entry, int | float) and not isinstance(entry, bool)
    shown = f"{entry:,.4g}" if isinstance(entry, float) else f"{entry:,}" if number else entry
    return f'<td class="number">{escape(shown)}</td>' if number else f"<td>{escape(shown)}</td>"
