from html.parser import HTMLParser

from fwpkm_jax.evaluation.display import html
from fwpkm_jax.evaluation.display.plot_style import DPI, new_figure, save_figure

PIXEL = b"\x89PNG\r\n\x1a\n"


class Reader(HTMLParser):
    """What a browser would show and load."""

    def __init__(self, markup):
        super().__init__()
        self.open, self.shown, self.loads = [], [], []
        self.feed(markup)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.shown.append(data)


def test_whatever_a_text_holds_is_shown_and_never_becomes_markup(tmp_path):
    nasty = "<script>alert('\"&amp;</style>"
    picture = tmp_path / "picture.png"
    picture.write_bytes(PIXEL)
    markup = html.page(
        nasty,
        html.heading(nasty),
        html.paragraph(nasty, kind="small"),
        html.table([nasty], [[nasty], [3], [0.5]]),
        html.image(picture, description=nasty, dpi=96),
        f"<span>{html.show_token(nasty)}</span>",
    )
    reader = Reader(markup)
    assert reader.open == []
    assert "script" not in markup.replace("&lt;script", "")
    assert reader.shown.count(nasty) == 7  # Twice as the title.
    assert all(source.startswith("data:") for source in reader.loads)
    path = html.save_page(markup, tmp_path / "folder" / "page.html")
    assert path.read_text(encoding="utf-8") == markup


def test_pictures_are_as_large_on_the_page_as_they_were_drawn(tmp_path):
    figure, _ = new_figure(5.0, 3.0)
    path = save_figure(figure, tmp_path / "picture.png")
    assert 'width="480"' in html.image(path, description="5 of the page's inches", dpi=DPI)


def test_invisible_characters_of_a_token_show():
    assert html.show_token("a b\n\t\x00\u200b<") == "a b\u23ce\u21e5\\x00\\x200b&lt;"
