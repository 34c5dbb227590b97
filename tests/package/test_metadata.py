"""What pyproject.toml, the citation file and the code say of the package agrees."""

import ast
import re
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fwpkm_jax

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules whose distribution has another name.
MODULES = {
    "lm-eval": "lm_eval",
    "mistral-common": "mistral_common",
    "orbax-checkpoint": "orbax",
}


def module_of(requirement):
    name = re.match(r"[A-Za-z0-9_-]+", requirement).group()
    return MODULES.get(name, name)


def imports(path):
    """Top-level modules that a file imports, without those that type checkers alone read."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def test_everything_the_package_imports_is_a_declared_dependency():
    """Tests run with [dev] installed, a user's environment without it."""
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"]]
    for name in ("plots", "tensorboard", "tokenizers", "data", "hf", "buckets", "lm-eval", "wandb"):
        declared += extras[name]  # Where asked for.
    known = {module_of(requirement) for requirement in declared}
    known |= {"ml_dtypes", "scipy", "absl"}  # jax and grain require them.
    known |= {"torch"}  # Reads its own files, where it is installed.
    known |= {"fwpkm_jax", "pallas_kernels", *sys.stdlib_module_names}
    for folder in ("fwpkm_jax", "pallas_kernels"):
        for path in sorted((ROOT / folder).glob("**/*.py")):
            if path.parent.name == "programs":  # They run where they are exported to.
                continue
            unknown = set(imports(path)) - known
            assert not unknown, f"{path.relative_to(ROOT)} imports {unknown}"


def test_few_packages_are_required_and_each_is_imported():
    required = {module_of(line) for line in PROJECT["dependencies"]}
    assert len(required) <= 10
    used = {name for path in (ROOT / "fwpkm_jax").glob("**/*.py") for name in imports(path)}
    assert required <= used


def test_every_pip_finds_the_extras():
    """The pip that comes with Python 3.11 warns of `lm_eval` and installs nothing for it."""
    for name in PROJECT["optional-dependencies"]:
        assert name == canonicalize_name(name)


def test_a_package_that_changes_its_interface_before_its_next_version_has_a_cap():
    """Each of these is at 0.x and removes what it has called deprecated: 0.x+1 or 1.0."""
    requirements = [Requirement(line) for line in PROJECT["dependencies"]]
    for requirement in requirements:
        assert any(x.operator in (">=", "==") for x in requirement.specifier), requirement
    capped = {
        x.name: x.specifier for x in requirements if any(s.operator == "<" for s in x.specifier)
    }
    assert capped.keys() >= {"jax", "flax", "orbax-checkpoint"}
    orbax = capped["orbax-checkpoint"]
    assert orbax.contains(version("orbax-checkpoint"))
    assert not orbax.contains("0.12.7")
    assert not orbax.contains("1.0.0")
    assert not orbax.contains("1.0.0rc1", prereleases=True)


def test_the_version_has_one_source():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", fwpkm_jax.__version__)
    assert citation["version"] == fwpkm_jax.__version__
    assert f"## {fwpkm_jax.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert citation["license"] == PROJECT["license"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
