"""What `import fwpkm_jax` and its rooms give, and how fast."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fwpkm_jax

ROOT = Path(__file__).parents[2]
ROOMS = ("rules", "layers", "models", "training", "evaluation", "generation", "data", "interchange")
MODULES = ("fwpkm_jax", *(f"fwpkm_jax.{room}" for room in ROOMS))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there(module):
    package = importlib.import_module(module)
    assert package.__all__
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        _ = package.Nothing


@pytest.mark.parametrize("module", ["fwpkm_jax", "fwpkm_jax.training"])
def test_type_checkers_see_what_a_program_gets(module):
    """Names that are imported on first use stand once more where type checkers read them."""
    package = importlib.import_module(module)
    (block,) = [
        node for node in ast.parse(inspect.getsource(package)).body if isinstance(node, ast.If)
    ]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            seen[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    assert seen.keys() == set(package.__all__) - {"__version__"}
    assert all(getattr(package, name) is value for name, value in seen.items())


def test_the_front_door_has_few_names():
    assert 20 <= len(fwpkm_jax.__all__) <= 30
    for name in set(fwpkm_jax.__all__) - {"__version__"}:
        assert f"`{name}`" in fwpkm_jax.__doc__, name
        assert inspect.getdoc(getattr(fwpkm_jax, name)), name


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, time; start = time.perf_counter(); import fwpkm_jax, fwpkm_jax.training;"
        "print(time.perf_counter() - start, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, *heavy = done.stdout.split()
    assert heavy == ["False", "False"]
    assert float(seconds) < 1.0
