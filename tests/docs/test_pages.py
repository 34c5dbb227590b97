"""What the pages name exists: files, modules, commands, configs."""

import ast
import functools
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from fwpkm_jax.cli.experiment import parse_command_line
from fwpkm_jax.cli.program import COMMANDS
from fwpkm_jax.config import shipped_configs

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [page for page in PAGES if "_build" not in page.parts]
FOLDERS = ("fwpkm_jax", "pallas_kernels", "benchmarks", "lab", "tests", "configs", "launch", "docs")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/(?!_build)[\w/.-]*\w)`")


def named(pattern: str) -> list:
    """Every match of a pattern with the page it is on."""
    found = [(page, name) for page in PAGES for name in re.findall(pattern, page.read_text())]
    return [pytest.param(name, id=f"{page.stem}: {name}") for page, name in found]


@pytest.mark.parametrize("path", named(PATH.pattern))
def test_a_file_that_a_page_names_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("module", named(r"python -m ((?:fwpkm_jax|benchmarks|lab)[\w.]*\w)"))
def test_a_program_that_a_page_runs_exists(module):
    assert importlib.util.find_spec(module) is not None


def anchors(page: Path) -> set[str]:
    """What a link can have behind its `#`: headings as GitHub and as docutils write them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = [head.lower() for head in re.findall(r"^#+ +(.+)", text, re.MULTILINE)]
    github = {re.sub(r"[^\w -]", "", head).replace(" ", "-") for head in heads}
    return github | {re.sub(r"[^a-z0-9]+", "-", head).strip("-") for head in heads}


def test_a_link_leads_to_a_heading_of_a_page():
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([^)]+)\)", page.read_text()):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {path}"
            assert anchor in anchors(target), f"{page}: {path}#{anchor}"


def linked(page: Path) -> set[str]:
    """What a page links to by a path, without anchors."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r'\]\(<?([^)\s>]+)|(?:src|href)="([^"]+)', text)
    return {path for x in found if ":" not in (path := "".join(x).partition("#")[0]) and path}


def test_a_link_leads_to_a_file_that_is_there_wherever_the_page_is_read():
    """The site has the pages of docs/ alone; elsewhere a page is read in the repository."""
    others = [
        *ROOT.glob("*/README.md"),
        *(ROOT / "lab").rglob("*.md"),
        *ROOT.glob("examples/*/*.md"),
    ]
    assert sum(len(linked(page)) for page in PAGES) > 200
    for page in (*PAGES, *others):
        site = ROOT / "docs" if "docs" in page.parts else ROOT
        for path in linked(page):
            target = (page.parent / path).resolve()
            assert target.exists(), f"{page}: {path}"
            assert target.is_relative_to(site), f"{page}: {path}"


def test_an_extra_that_a_page_installs_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = {
        extra
        for page in PAGES
        for names in re.findall(r"pip install[^`\n]*\.\[([\w,-]+)\]", page.read_text())
        for extra in names.split(",")
    }
    assert len(found) > 8
    assert found <= extras.keys()


def test_a_link_has_a_text():
    """Which the site would write by itself, and a reader of the repository would not see."""
    assert [page for page in PAGES if "[](" in page.read_text()] == []


def test_a_table_has_no_blank_line():
    """It would end the table, and show its other rows as text."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        broken = re.search(r"^\|.*\n\n(\|.*)\n(?!\|[-| :]+$)", text, re.MULTILINE)
        assert broken is None, f"{page}: {broken[1]}"


def test_an_install_line_works_before_the_package_is_published():
    for page in (*PAGES, *(ROOT / "fwpkm_jax").rglob("*.py")):
        assert not re.search(r"pip install[^`\n]* '?fwpkm-jax", page.read_text()), page


@pytest.mark.parametrize("command", named(r"fwpkm ([a-z]+)\b(?! and| adds| has)"))
def test_a_command_that_a_page_runs_exists(command):
    assert command in COMMANDS


@pytest.mark.parametrize("config", named(r"fwpkm train ([a-z]\w+)(?![\w/.])"))
def test_a_config_that_a_page_trains_exists(config):
    assert config in shipped_configs()


def test_the_start_pages_code_is_the_readmes_which_the_tests_run():
    code = re.compile(r"```python\n(>>> .*?)\n+```", re.DOTALL)
    start, readme = (
        code.findall((ROOT / name).read_text()) for name in ("docs/index.md", "README.md")
    )
    assert start == readme
    assert len(start) == 1


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts], ids=str)
def test_code_of_the_site_fits_into_its_column(page):
    blocks = re.findall(r"^( *)```(?!\{eval-rst)(.*?)^\1```", page.read_text(), re.M | re.DOTALL)
    wide = [line for _, block in blocks for line in block.splitlines() if len(line) > 80]
    assert not wide, "more than 80 columns"


def test_the_drawings_are_those_of_their_program():
    program = ROOT / "docs" / "drawings.py"
    spec = importlib.util.spec_from_file_location("drawings", program)
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name, drawing in drawings.DRAWINGS.items():
        stored = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawing().svg() == stored, f"python docs/drawings.py draws {name}.svg again"


def test_the_page_on_devices_begins_with_a_command_that_two_hosts_can_run():
    page = (ROOT / "docs" / "howto" / "devices.md").read_text()
    command = re.search(r"```bash\nfwpkm train (.*?)```", page, re.DOTALL)[1]
    assert page.index(command) < 400
    experiment = parse_command_line(shlex.split(command.replace("\\\n", "")), default="")
    assert experiment.distributed.num_processes == 2
    assert experiment.mesh.num_devices == 8
    assert experiment.training.batch_size % 8 == experiment.training.memory.groups % 8 == 0


def test_every_option_of_the_page_on_training_is_one():
    page = (ROOT / "docs" / "howto" / "train.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^fwpkm train (\w+ .*)$", page, re.MULTILINE)
    assert len(commands) >= 5
    parsed = [parse_command_line(shlex.split(command), default="") for command in commands]
    assert any(experiment.optimizer.ema for experiment in parsed)
    assert any(experiment.optimizer.name == "schedule_free" for experiment in parsed)
    assert any(experiment.training.remat == "block" for experiment in parsed)


def test_every_question_is_answered_by_at_most_three_files():
    page = (ROOT / "docs" / "reference" / "questions.md").read_text().split("\n## ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and "?" in line]
    assert len(rows) >= 6
    for row in rows:
        assert 1 <= len(PATH.findall(row[2])) <= 3
        for path, name in re.findall(rf"{PATH.pattern} \(`(\w+)`\)", row[2]):
            defined = rf"^ *(?:(?:def|class) {name}\b|{name} *[:=])"
            assert re.search(defined, (ROOT / path).read_text(), re.MULTILINE), (path, name)


TEST = re.compile(r"`(tests/[\w/]+\.py)?(?:::)?(test_\w+)?`")


@functools.cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    return {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}


def missing_tests(text: str) -> list[str]:
    """Tests that a text names and that are none; `::test_x` is of the files named in its line."""
    missing = []
    for line in text.splitlines():
        files = []
        for path, name in TEST.findall(line):
            files += [ROOT / path] if path else []
            if name and not any(name in functions(file) for file in files):
                missing.append(f"{path}::{name}")
    return missing


def test_a_test_that_a_page_names_exists():
    assert not [
        (page.name, missing) for page in PAGES if (missing := missing_tests(page.read_text()))
    ]
    assert not missing_tests("`tests/docs/test_pages.py::test_a_table_has_no_blank_line`")
    assert missing_tests("`tests/docs/test_pages.py::test_b`, `::test_c`") == [
        "tests/docs/test_pages.py::test_b",
        "::test_c",
    ]


def test_the_table_of_faults_names_tests_that_exist():
    page = (ROOT / "lab" / "archive" / "faults.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([\w/]*test_\w+\.py)`", row)}
    assert len(named) > 30
    assert not [x for x in named if not (ROOT / "tests" / x.removeprefix("tests/")).exists()]


def test_each_promise_names_the_tests_that_hold_it():
    page = (ROOT / "docs" / "reference" / "guarantees.md").read_text()
    promises = re.findall(r"^- \*\*(.+?)\.\*\*", page, re.MULTILINE)
    rows = re.findall(r"^\| ([^|`]+?) \| .*`tests/.* \|$", page, re.MULTILINE)
    assert len(promises) > 15
    assert {*promises} <= {*rows}


def test_what_one_reads_before_adding_an_evaluation_is_short():
    page = ROOT / "docs/howto/add_evaluation.md"
    (line,) = re.findall(r"^Read first: this page, (.*)$", page.read_text(), re.MULTILINE)
    files = [page, *(ROOT / path for path in re.findall(r"`([^`]+)`", line))]
    assert len(files) == 3
    assert sum(len(path.read_text().splitlines()) for path in files) <= 350
