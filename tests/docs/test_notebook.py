"""The notebook for an empty machine: what it installs, and the link that opens it at a host."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "tutorials" / "fresh_machine.ipynb"


def cells(kind):
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def build_settings():
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("site_settings", DOCS / "conf.py")
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    return settings


@pytest.mark.parametrize("repository", ["owner/name", None])
def test_the_page_links_to_colab_where_the_host_names_the_repository(repository, monkeypatch):
    for name, value in {"GITHUB_REPOSITORY": repository, "GITHUB_REF_NAME": "main"}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    text = NOTEBOOK.read_text()
    read, other = [text], [text]
    settings = build_settings()
    settings.add_badge(None, "tutorials/fresh_machine", read)
    settings.add_badge(None, "tutorials/other", other)
    assert other == [text]
    if repository is None:
        assert read == [text]
        return
    page = (
        "colab.research.google.com/github/owner/name/blob/main/docs/tutorials/fresh_machine.ipynb"
    )
    changed, before = json.loads(read[0]), json.loads(text)
    first = changed["cells"][0].pop("source")
    title, empty, badge, *rest = first.split("\n")
    assert f"](https://{page})" in badge
    assert "\n".join([title, *rest]) == "".join(before["cells"][0].pop("source"))
    assert (empty, changed) == ("", before)


@pytest.mark.parametrize(
    ("given", "checkout", "installed"),
    [
        (None, False, "fwpkm-jax"),
        (None, True, "../.."),
        ("git+https://host/owner/name", True, "git+https://host/owner/name"),
    ],
)
def test_the_first_cell_installs_a_checkout_the_release_or_what_is_named(
    given, checkout, installed, monkeypatch, tmp_path
):
    folder = tmp_path / "docs" / "tutorials"
    folder.mkdir(parents=True)
    if checkout:
        (tmp_path / "fwpkm_jax").mkdir()
        (tmp_path / "fwpkm_jax" / "__init__.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("FWPKM_JAX", raising=False)
    if given is not None:
        monkeypatch.setenv("FWPKM_JAX", given)
    calls = []

    def run(command, **_):
        calls.append(command)
        return SimpleNamespace(returncode=len(calls) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cell = cells("code")[0]
    exec(cell, {})
    assert calls[0][1:] == ["-m", "pip", "install", "-q", installed]
    with pytest.raises(SystemExit, match="write the repository into SOURCE"):
        exec(cell, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    exec(cell, {})
    assert len(calls) == 2


def test_a_notebook_service_can_follow_each_link():
    """Which has the notebook alone, neither the pages beside it nor the site."""
    texts = [*cells("markdown"), "[all](results/report.html) and [some](https://a.org/b)"]
    found = [link for text in texts for link in re.findall(r"\]\(([^)]+)", text)]
    assert [link for link in found if not link.startswith("https://")] == ["results/report.html"]


def test_each_part_says_how_long_its_cells_take():
    parts = [text for text in cells("markdown") if "## " in text]
    assert len(parts) == 4
    for text in parts:
        assert "minute" in text
