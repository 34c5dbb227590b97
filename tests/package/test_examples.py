"""The examples in docstrings run, each as it stands."""

import doctest
import importlib
from pathlib import Path

import pytest

import fwpkm_jax
from fwpkm_jax.layers.mixers.registry import _MIXERS
from fwpkm_jax.rules import RULES

ROOT = Path(__file__).parents[2]


def examples():
    """Every docstring with an example, of the modules that contain one."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in sorted((ROOT / "fwpkm_jax").glob("**/*.py")):
        if ">>> " in path.read_text():
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            module = importlib.import_module(name)
            yield from (t for t in finder.find(module, name) if t.examples)


EXAMPLES = {test.name: test for test in examples()}
LONGEST = {
    "fwpkm_jax.functions.fwpkm",
    "fwpkm_jax.functions.product_key_lookup",
    "fwpkm_jax.functions.sparse_delta",
    "fwpkm_jax.generation.generate.generate",
    "fwpkm_jax.generation.continuous_batching.open_batch",
    "fwpkm_jax.layers.memories.fast_weight.FastWeight",
    "fwpkm_jax.models.language_model.LanguageModel",
}
"""Examples that compile for a second or more: weekly."""


@pytest.fixture
def registries():
    """Forgets what an example registers."""
    kept = [(registry, dict(registry)) for registry in (RULES, _MIXERS)]
    yield
    for registry, content in kept:
        registry.clear()
        registry.update(content)


@pytest.mark.thorough
@pytest.mark.slow_cases(*LONGEST)
@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    told = []
    runner.run(EXAMPLES[name], out=told.append)
    assert not runner.failures, "".join(told)


@pytest.mark.parametrize("name", sorted({*fwpkm_jax.__all__} - {"__version__"}))
def test_every_public_name_has_an_example(name):
    assert any(example.endswith(f".{name}") for example in EXAMPLES)
