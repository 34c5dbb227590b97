"""The workflow that builds, checks and publishes a release."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import fwpkm_jax
from fwpkm_jax.cli.eval_command import parse
from fwpkm_jax.cli.experiment import parse_command_line

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(FILE.read_text())["jobs"]


def commands(job) -> list[str]:
    return [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_only_the_job_that_publishes_may_and_only_a_checked_tag_is(jobs):
    whole = yaml.safe_load(FILE.read_text())
    assert whole[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads `on` as true.
    assert whole["permissions"] == {"contents": "read"}
    allowed = {name: job.get("permissions") for name, job in jobs.items()}
    assert allowed == {"build": None, "test": None, "try": None, "publish": {"id-token": "write"}}
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert set(jobs["publish"]["needs"]) == {"build", "test", "try"}
    uses = [step["uses"] for step in jobs["publish"]["steps"]]
    assert uses[-1].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in FILE.read_text()
    assert all(job["timeout-minutes"] <= 30 for name, job in jobs.items() if name != "test")


def test_the_site_is_built_as_contributing_says_and_published_from_main_alone():
    whole = yaml.safe_load(FILE.with_name("site.yml").read_text())
    assert whole["permissions"] == {"contents": "read"}
    build, publish = whole["jobs"]["build"], whole["jobs"]["publish"]
    told = (ROOT / "CONTRIBUTING.md").read_text().replace(".venv/bin/python", "python")
    assert commands(build)[-1] in told
    kept = next(step for step in build["steps"] if "pages-artifact" in step.get("uses", ""))
    assert commands(build)[-1].endswith(f" docs {kept['with']['path']}")
    assert publish["if"] == "github.ref == 'refs/heads/main'"
    assert publish["permissions"] == {"id-token": "write", "pages": "write"}
    assert "permissions" not in build


def test_links_of_the_readme_that_the_index_shows_lead_to_the_repository(jobs, tmp_path):
    (step,) = [x for x in jobs["build"]["steps"] if x.get("name", "").startswith("Links of README")]
    before = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(before)
    place = {"SERVER_URL": "https://a.org", "REPOSITORY": "me/it", "REF_NAME": "v1.2.3"}
    place = {f"GITHUB_{name}": value for name, value in place.items()}
    subprocess.run(
        ["bash", "-ec", step["run"]], cwd=tmp_path, env={**os.environ, **place}, check=True
    )
    after = (tmp_path / "README.md").read_text()
    pattern = r'(!?)\[[^]]*\]\(([^)]+)\)|src="([^"]+)"'
    links = zip(re.findall(pattern, before), re.findall(pattern, after), strict=True)
    changed = 0
    for (image, link, source), (_, *now) in links:
        if ":" in link:
            assert now == [link, ""]
            continue
        kind = "raw" if image or source else "blob"
        assert "".join(now) == f"https://a.org/me/it/{kind}/v1.2.3/{link or source}"
        changed += 1
    assert changed > 20
    assert re.sub(pattern, "", after) == re.sub(pattern, "", before)


def test_actions_are_named_by_commit_as_a_tag_can_be_moved():
    for path in FILE.parent.glob("*.yml"):
        for line in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line), f"{path.name}: {line}"


def test_what_is_published_has_passed_every_test(jobs):
    whole = 'python -m pytest -q -n auto -m "slow or not slow"'
    assert commands(jobs["test"])[-2:] == [whole, f"{whole} lab/tests"]


def test_what_is_published_was_built_checked_and_installed(jobs):
    build = commands(jobs["build"])
    assert build.index("python -m build") < build.index("python -m twine check --strict dist/*")
    names = [
        step["with"]["name"]
        for job in jobs.values()
        for step in job["steps"]
        if "artifact" in step.get("uses", "")
    ]
    assert names == ["dist"] * 3
    tried = commands(jobs["try"])
    assert tried[0] == "python -m pip install -q dist/${{ matrix.kind }}"
    assert set(jobs["try"]["strategy"]["matrix"]["kind"]) == {"*.whl", "*.tar.gz"}
    for command in tried[1:]:
        assert re.match(r"fwpkm (--version|train|eval)", command)
    train, evaluation = (shlex.split(x)[2:] for x in tried[2:])
    assert parse_command_line(train, default="").training.steps == 3
    assert parse(evaluation).limit == 1


@pytest.mark.parametrize(("tag", "code"), [(f"v{fwpkm_jax.__version__}", 0), ("v9.9.9", 1)])
def test_a_tag_that_is_not_the_version_stops_the_release(jobs, tag, code):
    step = next(x for x in jobs["build"]["steps"] if x.get("name") == "The tag is the version")
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=ROOT,
        env=os.environ | {"GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert (f"v{fwpkm_jax.__version__}" in done.stderr) == bool(code)
