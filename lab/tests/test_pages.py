"""Tables of the pages of measurements are those of the stored lines."""

import json

import pytest

from benchmarks.processes import ROOT
from lab.comparison.mqar_tables import rates_table as mqar_rates_table
from lab.comparison.mqar_tables import recall_by_seed
from lab.comparison.tables import spans_table, state_tracking_table
from lab.findings import FINDINGS, drawing
from lab.pages import RESULTS
from lab.study.plain_text import rates_table
from lab.study.tables import control_table, needle_table, still_table
from tests.benchmarks.programs import run

PAGE = """# Shares

Text.

<!-- table: retrofit lines.jsonl of.kind=a rows="fwpkm:[01]" without=":1" columns="run|trained" -->
| run |
|---|
| old |

| another table |
|---|
| stays |
"""


@pytest.fixture
def folders(tmp_path):
    """Options of the program for a folder with one page and one file of lines."""
    rows = [
        {"run": run, "trained": trained, "perplexity": 4.0, "of": {"kind": kind}}
        for run, trained, kind in (
            *(("backbone:0", 1000, "a"), ("fwpkm:0", 1001, "a")),
            *(("fwpkm:1", 1002, "a"), ("fwpkm:0", 1003, "b")),
        )
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "page.md").write_text(PAGE)
    return tmp_path, ("--pages", tmp_path, "--results", tmp_path)


def test_the_pages_show_what_the_lines_say(capsys):
    written = (ROOT / "docs/measurements", ROOT / "lab/archive", ROOT / "README.md")
    results = map(ROOT.joinpath, RESULTS)
    run("lab.pages", "--pages", *written, "--results", *results, "--check")


def test_a_table_is_replaced_by_the_rows_that_its_comment_asks_for(folders, capsys):
    folder, options = folders
    with pytest.raises(SystemExit, match=r"python -m lab\.pages"):
        run("lab.pages", *options, "--check")
    assert "page.md" in capsys.readouterr().out
    assert (folder / "page.md").read_text() == PAGE
    run("lab.pages", *options)
    table = "| run | trained |\n|---|---|\n| fwpkm:0 | 1,001 |\n"
    expected = PAGE.replace("| run |\n|---|\n| old |\n", table)
    assert (folder / "page.md").read_text() == expected
    run("lab.pages", *options, "--check")


def test_every_finding_with_a_picture_is_drawn(folders, tmp_path, capsys):
    _, options = folders
    run("lab.pages", *options, "--draw", "--images", tmp_path / "images")
    drawn = {path.stem: path.read_text() for path in (tmp_path / "images").glob("*.svg")}
    assert drawn.keys() == {*FINDINGS} - {"readme", "objections"}
    for name, picture in drawn.items():
        assert "prefers-color-scheme: dark" in picture
        assert len(picture) > 5_000
        assert (ROOT / f"docs/images/findings/{name}.svg").exists()


def test_a_picture_has_a_colour_for_a_dark_page_for_each_of_its_colours():
    with pytest.raises(ValueError, match=r"#123456.*add one to ON_DARK"):
        drawing.in_both_themes('<svg><defs></defs><path style="fill: #123456"/></svg>')
    themed = drawing.in_both_themes(f'<svg><defs></defs><path style="fill: {drawing.BLUE}"/></svg>')
    assert 'style="fill: var(--1f6fb4)"' in themed
    assert f"--1f6fb4: {drawing.ON_DARK[drawing.BLUE]}" in themed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("retrofit ", "retro ", "page.md: .*retro is none of"),
        ("of.kind=a", "of.kind=c", r"page.md: .*no line of \['lines.jsonl'\]"),
        ("run|trained", "walk", r"page.md: .*leaves nothing of a table with the columns \['run'"),
        ('rows="fwpkm:[01]"', "rows=lora", "page.md: .*leaves nothing"),
        ("lines.jsonl", "none.jsonl", "page.md: .*none.jsonl"),
    ],
)
def test_a_comment_that_asks_for_nothing_is_named(folders, old, new, message):
    folder, options = folders
    (folder / "page.md").write_text(PAGE.replace(old, new))
    with pytest.raises(SystemExit, match=message):
        run("lab.pages", *options)


def test_recall_by_seed_takes_the_rate_that_the_first_seed_chose():
    def row(memory, rate, seed, batch, share):
        about = {"memory": memory, "rate": rate, "seed": seed, "settings": {"batch_size": batch}}
        test = [{"pairs": 4, "accuracy": 1.0}, {"pairs": 64, "accuracy": share}]
        return about | {"valid": share, "steps": 9, "test": test}

    rows = [
        *(row("a", 0.1, 1, 256, 0.3), row("a", 0.1, 0, 256, 0.5), row("a", 0.01, 0, 256, 0.4)),
        *(row("b", 0.01, 0, 256, 0.8), row("a", 0.01, 0, 64, 0.1), row("b", 0.01, 0, 64, 0.2)),
        row("c", 0.01, 0, 64, 0.9),
    ]
    head, _, *found = recall_by_seed(rows).splitlines()
    assert head == "| memory | 64 documents (rate) | 256 documents (rate) |"
    assert found == [
        "| `b` | 0.20 (0.01) | 0.80 (0.01) |",
        "| `a` | 0.10 (0.01) | 0.50, 0.30 (0.1) |",
    ]
    warm = row("b", 0.01, 0, 64, 0.6)
    warm["settings"] = {"batch_size": 64, "warmup": 9}
    head, _, only = recall_by_seed([*rows, warm]).splitlines()
    assert "| 64 documents (rate) | 64 documents, 9 updates of warm-up (rate) |" in head
    assert only == "| `b` | 0.20 (0.01) | 0.60 (0.01) | 0.80 (0.01) |"


def test_the_chosen_rate_of_the_first_seed_is_bold():
    def row(memory, rate, seed, valid):
        return {"memory": memory, "rate": rate, "seed": seed, "valid": valid, "steps": 9}

    rows = [row("b", 0.1, 0, 0.5), row("b", 0.01, 0, 0.75), row("b", 0.1, 1, 0.9)]
    assert mqar_rates_table([*rows, row("a", 0.1, 1, 0.25)]).splitlines() == [
        "| memory | rate 0.01 | rate 0.1 |",
        "|---|---|---|",
        "| `a` |  | **0.250** |",
        "| `b` | **0.750** | 0.500 |",
    ]


def test_spans_are_shown_run_by_run():
    about = {"steps": 9, "batch_size": 2, "heads": 1, "width": 8, "learning_rate": 1e-3}
    spans = [{"above": 0, "up_to": 4, "accuracy": 0.5}, {"above": 4, "up_to": 8, "accuracy": None}]
    row = {"rule": "deltanet", "settings": about, "seed": 3, "spans": spans, "loss": 0.25}
    head, _, line = spans_table([row | {"cpu_seconds": 90}]).splitlines()
    assert "| tokens 1-4 | tokens 5-8 |" in head
    assert line == "| `deltanet` | 9 | 2 | 1 | 8 | 0.001 | 3 | 0.500 |  | 0.250 | 2 |"


def test_states_are_means_with_the_worst_of_several_seeds():
    def row(rule, group, seed, first, last):
        spans = [(0, 4, first), (4, 8, 0.5), (8, 16, last)]
        spans = [{"above": a, "up_to": b, "accuracy": share} for a, b, share in spans]
        return {"rule": rule, "group": group, "seed": seed, "spans": spans, "state_bytes": 64}

    rows = [row("a", "s3", 0, 1.0, 0.5), row("a", "s3", 1, 0.5, None), row("a", "parity", 0, 1, 1)]
    head, _, first, second = state_tracking_table([*rows, row("b", "parity", 0, 0, 1)]).splitlines()
    assert "| s3, tokens 1-4 | s3, tokens 9-16 | parity, tokens 1-4 |" in head
    assert first == "| `a` | 64 | 1 to 2 | 0.750 (0.500) | 0.500 | 1.000 | 1.000 |"
    assert second == "| `b` | 64 | 1 |  |  | 0.000 | 1.000 |"


def needles(*shares):
    rest = {"words": 56, "interval": [0, 1], "digits": 3.0}
    return [
        {**rest, "readings": n, "accuracy": x, "right_by_part": [n, 0]}
        for n, x in zip((1, 4), shares, strict=True)
    ]


def test_controls_of_one_run_may_come_from_several_files():
    first = {"run": "a:1", "ppl": {"writing": 5.0, "frozen": 5.5}, "needle_1x": needles(0.5, 1.0)}
    second = {"run": "a:1", "ppl_reset": {"writing": 5.25}, "ppl_ablated": {"frozen": 6.0}}
    second["needle_other"] = needles(0.0, 0.25)
    head, _, row = control_table([first, {"run": "b:0", "ppl": {}}, second]).splitlines()
    assert "reset after" not in head
    assert row == "| a | 1 | 5.000 | 5.250 | 5.500 | 6.000 | 0.50, 1.00 | 0.00, 0.25 |"
    # A file of controls alone, before the run's other lines are beside it.
    assert len(control_table([second]).splitlines()) == 2


def test_needles_with_still_keys_stand_beside_those_with_moving_ones():
    line = {"run": "a:1", "train_loss": 1.0, "needle_1x": needles(0.5, 1.0)}
    line["needle_1x_still"] = needles(0.25, 0.75)
    *_, first, second = still_table([line, line | {"run": "a:0"}]).splitlines()
    assert first.startswith("| a | 0 |")
    assert second == (
        "| a | 1 | 1.00 | 56 | 0.50 [0.00, 1.00] | 1.00 [0.00, 1.00] | 4, 0 |"
        " 0.25 [0.00, 1.00] | 0.75 [0.00, 1.00] | 4, 0 |"
    )


def test_means_over_seeds_are_of_the_rows_with_the_same_label():
    rows = [
        {"run": f"a:{seed}", "needle_1x": needles(0.5, 1.0), "needle_window": needles(share, 1.0)}
        for seed, share in enumerate((0.0, 0.5))
    ]
    means = [row for row in needle_table(rows).splitlines() if "mean of 2" in row]
    plain, limited = means
    assert plain.startswith("| a | mean of 2 | 56 |  | 0.50")
    assert limited.startswith("| a, window | mean of 2 | 56 |  | 0.25")


def test_rates_are_those_of_the_first_seed():
    def row(kind, rate, seed, loss):
        return {"kind": kind, "rate": rate, "seed": seed, "train_loss": loss}

    rows = [row("a", 0.2, 0, 1.5), row("a", 0.1, 0, 1.25), row("b", 0.1, 0, 2.0)]
    found = rates_table([*rows, row("b", 0.2, 1, 9.0)]).splitlines()
    assert found[0] == "| loss in nats | rate 0.1 | rate 0.2 |"
    assert found[2:] == ["| a | 1.250 | 1.500 |", "| b | 2.000 |  |"]
