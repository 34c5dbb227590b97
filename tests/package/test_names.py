"""What `import fwpkm_jax` and its rooms give, and how fast."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

import fwpkm_jax
from fwpkm_jax import layers, models
from fwpkm_jax.layers.mixers import mixer_config, mixer_names

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("rules", "layers", "layers.mixers", "models", "training", "evaluation", "generation"),
    *("audit", "data", "interchange", "memories", "run", "testing"),
)
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


@pytest.mark.parametrize(
    "module",
    [
        "fwpkm_jax",
        *(f"fwpkm_jax.{room}" for room in ("rules", "layers", "layers.mixers", "training")),
    ],
)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: layers.FastWeight(layers.FastWeightConfig(), 16, rngs=rngs),
        lambda rngs: layers.PKM(layers.PKMConfig(), 16, rngs=rngs),
        lambda rngs: layers.SwiGLU(16, 32, rngs=rngs),
        lambda rngs: layers.RMSNorm(16),
        lambda rngs: layers.GatedRMSNorm(16),
        lambda rngs: layers.FastWeightLayer(layers.FastWeightLayerConfig(), 16, rngs=rngs),
        *(
            lambda rngs, name=name: mixer_config(name, models.ModelConfig()).build(768, rngs=rngs)
            for name in mixer_names()
        ),
    ],
)
def test_a_layer_needs_its_configuration_its_width_and_random_numbers_only(make):
    assert nnx.eval_shape(lambda: make(nnx.Rngs(0))) is not None
