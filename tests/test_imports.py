"""How modules import each other; import-linter checks the floors, which pyproject.toml lists."""

import graphlib
import json
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from fwpkm_jax.config import load_config, shipped_configs

ROOT = Path(__file__).parents[1]
MOST_FILES, MOST_LINES = 60, 9_000
"""Of this project, that run when one memory layer is imported."""


def in_a_new_program(code, *arguments):
    """What a program prints that has imported nothing yet."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["fwpkm_jax", "pallas_kernels"])
def test_no_circle_of_imports(package):
    """Imports for type checking and inside functions count too."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 20
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_memory_layer_brings_in_little():
    code = """
import sys
from fwpkm_jax import FastWeight, FastWeightConfig, FwPKM
ours = [m for n, m in sys.modules.items() if n.split(".")[0] in ("fwpkm_jax", "pallas_kernels")]
print(*(m.__file__ for m in ours if getattr(m, "__file__", None)), sep="\\n")
"""
    files = {Path(line) for line in in_a_new_program(code).splitlines()}
    lines = sum(path.read_text().count("\n") for path in files)
    assert 20 < len(files) <= MOST_FILES, sorted(files)
    assert lines <= MOST_LINES
    assert not [path for path in files if path.stem == "sdm" or path.parent.name == "delta"]


@pytest.mark.thorough
def test_a_stored_config_is_read_by_a_program_that_has_imported_no_rule_and_no_mixer(tmp_path):
    """Rules and mixers are imported by their names; a configuration names their classes."""
    names = [name for name in shipped_configs() if "__" not in name]
    stored = tmp_path / "configs.json"
    stored.write_text(json.dumps([load_config(name).to_json() for name in names]))
    code = """
import json, sys
from fwpkm_jax.config import from_json
for values in json.load(open(sys.argv[1])):
    assert from_json(values).to_json() == values
"""
    in_a_new_program(code, str(stored))
